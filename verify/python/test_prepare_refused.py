# SPDX-License-Identifier: MIT OR Unlicense
"""What demos/prepare.py refuses before and while it reads: each condition with what is just inside and just outside, and the
whole sentence. Needs neither tokenizers nor jinja2.

    test_prepare_refused.py FOLDER [DEMOS]     DEMOS: where prepare.py is, if not in demos/
"""
import collections
import gzip
import json
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, sys.argv[2] if len(sys.argv) > 2 else os.path.join(ROOT, "demos"))
import prepare  # noqa: E402
from tokens import data_sets, messages, model_folder, option_rules  # noqa: E402
from tokens.base import Refused, record_of  # noqa: E402
from tokens.dataset_info import Info  # noqa: E402
from tokens.drafts import Draft  # noqa: E402
from tokens.maker import Maker  # noqa: E402
from tokens.named_template import NamedTemplate  # noqa: E402
from tokens.token_file import MAGIC  # noqa: E402

OUT = sys.argv[1]
passed = failed = 0


def at(name):
    return os.path.join(OUT, name)


def said(call):
    """What it refuses with; None: it does not."""
    try:
        call()
    except Refused as why:
        return str(why)
    return None


def check(name, inside, outside, sentence):
    global passed, failed
    accepted = None if inside is None else said(inside)
    refused = said(outside)
    if accepted is None and refused == sentence:
        print(f"ok prepare_{name}")
        passed += 1
    else:
        print(f"FAIL prepare_{name}: " + (f"inside: {accepted}" if accepted else f"{refused!r} instead of {sentence!r}"))
        failed += 1


def write(name, data):
    os.makedirs(os.path.dirname(at(name)), exist_ok=True)
    with open(at(name), "wb") as file:
        file.write(data)
    return at(name)


# ---- options that do not go together ----

DATA = write("data.jsonl", b'{"input": "a", "output": "b"}\n')
TEXT, MORE = write("text.txt", b"some text\n"), write("more.txt", b"more\n")
OTHER = write("other", b"no token file")
EMPTY = write("empty", b"")
FILE = write("there", MAGIC + b"x")
os.makedirs(at("folder"), exist_ok=True)
BASE = ["--pretrain", "none", "--output", at("new.tokens"), "--dataset", DATA]


def settle(words):
    return lambda: option_rules.settle(prepare.options_of(BASE + words.replace("@", OUT).split()))


PLAIN = f"{TEXT} is plain text, cut into documents of --max_len tokens; it needs --pretrain_mode, other .txt files alone beside it, " \
        "no --dataset_probs, and a --max_len of 2 or more"
OPTIONS = [
    ("template_twice", "--apply_chat_template", "--apply_chat_template --input_template {}",
     "--apply_chat_template and --input_template are two ways to shape a text; leave out one of them"),
    ("template_pretrain", "--pretrain_mode", "--pretrain_mode --apply_chat_template",
     "--apply_chat_template and --pretrain_mode are two ways to shape a text; leave out one of them"),
    ("template_unused", "--tokenizer_chat_template x --apply_chat_template", "--tokenizer_chat_template x",
     "--tokenizer_chat_template is used by --apply_chat_template; add it"),
    ("template_named_twice", "--template qwen", "--template qwen --apply_chat_template",
     "--template qwen and --apply_chat_template are two ways to shape a text; leave out one of them"),
    ("template_named_and_input", "--template qwen", "--template qwen --input_template {}",
     "--template qwen and --input_template are two ways to shape a text; leave out one of them"),
    ("default_system", "--template qwen --default_system x", "--default_system x",
     "--default_system is written by --template; add it"),
    ("info_json", "--template qwen --dataset_info [{}]", "--template qwen --dataset_info [{",
     "--dataset_info is not JSON: Expecting property name enclosed in double quotes: line 1 column 3 (char 2); give a list with an "
     "object for each set"),
    ("info_count", "--template qwen --dataset_info [{}]", "--template qwen --dataset_info [{},{}]",
     "--dataset_info has 2 objects for 1 data sets; give one for each"),
    ("info_key", "--template qwen --dataset_info [{}]", "--template qwen --dataset_info [{}] --input_key a",
     "--dataset_info and --input_key both name keys; leave out one of them"),
    ("info_template", "--apply_chat_template --dataset_info [{}]", "--dataset_info [{}]",
     "--dataset_info gives conversations, which --template or --apply_chat_template writes; add one of them"),
    ("info_completion", '--dataset_info [{"formatting":"completion"}]', '--dataset_info [{"formatting":"alpaca"}]',
     "--dataset_info gives conversations, which --template or --apply_chat_template writes; add one of them"),
    ("info_formatting", '--template qwen --dataset_info [{"formatting":"openai"}]',
     '--template qwen --dataset_info [{"formatting":"chatml"}]',
     "--dataset_info has the formatting 'chatml'; alpaca, sharegpt, openai, messages, completion are known"),
    ("pretrain_kind", "--kind sft --pretrain_mode", "--kind pairs --pretrain_mode",
     "--pretrain_mode is for --kind sft, not for pairs; leave it out"),
    ("train_on_kind", "--kind labelled --train_on assistant", "--kind labelled --train_on last",
     "--train_on is for --kind sft, not for labelled; leave it out"),
    ("train_on_all", "--kind sft --train_on all", "--kind prompts --train_on all",
     "--train_on is for --kind sft, not for prompts; leave it out"),
    ("cut_prompts", "--kind prompts --truncation drop", "--kind prompts --truncation cut",
     "a prompt that is cut asks something else; leave out --truncation cut: longer prompts are dropped"),
    ("cut_prompts_both", "--kind pairs --truncation cut_both", "--kind prompts --truncation cut_both",
     "a prompt that is cut asks something else; leave out --truncation cut_both: longer prompts are dropped"),
    ("plain_mode", "--dataset @/text.txt --pretrain_mode", "--dataset @/text.txt", PLAIN),
    ("plain_alone", "--dataset @/text.txt,@/more.txt --pretrain_mode", "--dataset @/text.txt,@/data.jsonl --pretrain_mode", PLAIN),
    ("plain_last", "--dataset @/more.txt,@/text.txt --pretrain_mode", "--dataset @/data.jsonl,@/text.txt --pretrain_mode", PLAIN),
    ("plain_probs", "--dataset @/text.txt,@/more.txt --pretrain_mode",
     "--dataset @/text.txt,@/more.txt --pretrain_mode --dataset_probs 1,1", PLAIN),
    ("plain_len", "--dataset @/text.txt --pretrain_mode --max_len 2", "--dataset @/text.txt --pretrain_mode --max_len 1", PLAIN),
    ("plain_no_len", "--dataset @/text.txt --pretrain_mode --max_len 2", "--dataset @/text.txt --pretrain_mode --max_len 0", PLAIN),
    ("no_place", "--input_template {}", "--input_template {", "--input_template must have {} once, in the place of the prompt, but has none: '{'"),
    ("output_is_data", "--output @/new", "--output @/data.jsonl --overwrite",
     f"--output {DATA} is read as data; give another name"),
    ("output_is_last_data", "--dataset @/text.txt,@/more.txt --pretrain_mode --output @/new",
     "--dataset @/text.txt,@/more.txt --pretrain_mode --output @/more.txt",
     f"--output {MORE} is read as data; give another name"),
    ("output_folder", "--output @/folder/new", "--output @/folder",
     f"--output {at('folder')} exists and is not a regular file; give another name"),
    ("output_there", "--output @/there --overwrite", "--output @/there",
     f"--output {FILE} exists already; add --overwrite or give another name"),
    ("output_other", "--output @/empty --overwrite", "--output @/other --overwrite",
     f"--output {OTHER} exists and is not a token file, so --overwrite does not replace it; give another name"),
    ("output_nowhere", "--output @/folder/new", "--output @/no/new",
     f"--output {at('no/new')} is in a folder that does not exist; make it, or give another name"),
]
for name, inside, outside, sentence in OPTIONS:
    check(name, settle(inside), settle(outside), sentence)

# ---- files ----


def items(name):
    return lambda: list(data_sets.file_items(name))


def zipped(name, cut):
    packed = gzip.compress(b'{"a": 1}\n' * 3)
    return write(name, packed[:len(packed) - cut])


def records(data):
    return lambda: [record_of(payload) for _, _, payload in data_sets.file_items(write("records.jsonl", data))]


def of_set(words):
    return lambda: list(data_sets.data_items(prepare.options_of(BASE + words.replace("@", OUT).split())))


for name in ("split/train-0.jsonl", "tests/test.jsonl"):
    write(name, b'{"a": 1}\n')
JSON = "one whole object {...} per line"
check("file_none", items(DATA), items(at("no.jsonl")),
      f"{at('no.jsonl')} is not a file; give a .jsonl, .json, .jsonl.gz, .parquet or .txt, a folder, or json@FOLDER")
check("file_folder", items(DATA), items(at("folder")),
      f"{at('folder')} is not a file; give a .jsonl, .json, .jsonl.gz, .parquet or .txt, a folder, or json@FOLDER")
check("file_ending", items(DATA), items(OTHER),
      f"{OTHER} ends in neither .jsonl, .json, .jsonl.gz, .parquet nor .txt; only these are read")
check("file_cut", items(zipped("whole.jsonl.gz", 0)), items(zipped("cut.jsonl.gz", 1)),
      f"{at('cut.jsonl.gz')} is not a complete gzip file (Compressed file ended before the end-of-stream marker was reached); "
      "download it again")
check("file_no_gzip", None, items(write("no.jsonl.gz", b"xy" * 20)),
      f"{at('no.jsonl.gz')} is not a complete gzip file (Not a gzipped file (b'xy')); download it again")
check("split", lambda: data_sets.folder_files(at("split"), "train"), lambda: data_sets.folder_files(at("split"), "test"),
      f"{at('split')} has no data of --split test (test.jsonl, test-*.parquet, test/*.jsonl ...); it has train-0.jsonl")
check("split_of_tests", lambda: data_sets.folder_files(at("tests"), "test"), lambda: data_sets.folder_files(at("tests"), "train"),
      f"{at('tests')} has no data of --split train (train.jsonl, train-*.parquet, train/*.jsonl ...); it has test.jsonl")
check("split_of_nothing", None, lambda: data_sets.folder_files(at("folder"), "train"),
      f"{at('folder')} has no data of --split train (train.jsonl, train-*.parquet, train/*.jsonl ...); it has nothing")
check("set_kind", lambda: data_sets.set_files(f"json@{at('split')}", "train"), lambda: data_sets.set_files("csv@x", "train"),
      "--dataset csv@x: csv@ is unknown; give json@FOLDER or parquet@FOLDER")
check("probs_fewer", of_set("--dataset @/data.jsonl,@/data.jsonl --dataset_probs 1,0"),
      of_set("--dataset @/data.jsonl,@/data.jsonl --dataset_probs 1"),
      "--dataset_probs has 1 weights for 2 data sets; give one for each")
check("probs_more", of_set("--dataset @/data.jsonl --dataset_probs 1"), of_set("--dataset @/data.jsonl --dataset_probs 1,1"),
      "--dataset_probs has 2 weights for 1 data sets; give one for each")
check("record_list", records(b'{"a": 1}'), records(b'["a"]'), "the record is [\"a\"], but an object {...} is needed")
check("record_twice", records(b'{"a": 1, "b": 2}'), records(b'{"a": 1, "b": 2, "a": 3}'),
      'key "a" occurs twice; remove one of them')
check("record_last_twice", records(b'{"a": {"c": 1}}'), records(b'{"a": {"b": 1, "c": 2, "c": 3}}'),
      'key "c" occurs twice; remove one of them')
check("record_bytes", records('{"a": "\u00e9"}'.encode()), records(b'{"a": "\xe9"}'),
      "byte 7 is not UTF-8; convert the file to UTF-8")
check("record_cut", records(b'{"a": 1}'), records(b'{"a": 1'),
      f"broken JSON (Expecting ',' delimiter: line 1 column 8 (char 7)); {JSON} is needed")
check("record_last", records(b'{"a": 1}\n{"b": 2}'), records(b'{"a": 1}\n{"b": }'),
      f"broken JSON (Expecting value: line 1 column 7 (char 6)); {JSON} is needed")
check("record_deep", None, records(b'{"a": ' + b"[" * 100000),
      "broken JSON (lists or objects lie too deep in each other); remove it")
check("list_cut", records(b'[{"a": 1}]'), records(b'[{"a": 1}'),
      f"{at('records.jsonl')}: broken JSON (Expecting ',' delimiter: line 1 column 10 (char 9)); a list of objects, or one object "
      "per line is needed")
check("text_bytes", lambda: list(data_sets.stream_items([TEXT])), lambda: list(data_sets.stream_items([write("bad.txt", b"ab\xff")])),
      f"{at('bad.txt')}: byte 2 of a part is not UTF-8 (invalid start byte); convert the file to UTF-8")
check("text_none", None, lambda: list(data_sets.stream_items([at("none.txt")])),
      f"{at('none.txt')} cannot be read: No such file or directory; give a .txt of UTF-8")

# ---- messages ----


def message(found):
    return lambda: messages.message_of(found, "it")


SAYS = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
check("speaker", message({"from": "human", "value": "a"}), message({"from": "nobody", "value": "a"}),
      'it is from "nobody"; human, user, gpt, assistant, system, function_call, observation, tool are known')
check("function_call", message({"from": "function_call", "value": '{"name": "f"}'}), message({"from": "function_call", "value": "f"}),
      'it is from function_call, but its value is not JSON: "f"')
check("function_null", message({"from": "function_call", "value": '[{"name": "f"}]'}), message({"from": "function_call", "value": None}),
      "it is from function_call, but its value is not JSON: null")
CALL = 'a tool call is [{"name": 1}], but it is an object with "name" and "arguments"'
check("call_name", message({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}),
      message({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}), CALL)
check("call_last", message({"role": "assistant", "tool_calls": [{"name": "f"}], "function_call": {"name": "g"}}),
      message({"role": "assistant", "tool_calls": [{"name": "f"}], "function_call": {"name": 2}}),
      'a tool call is [{"name": "f"}, {"name": 2}], but it is an object with "name" and "arguments"')
check("call_text", None, message({"role": "assistant", "tool_calls": "f"}),
      'a tool call is ["f"], but it is an object with "name" and "arguments"')
PARTS = "but only parts of type text can be read; remove it"
check("part_first", message({"role": "user", "content": [PART, PART]}), message({"role": "user", "content": ["a", PART]}),
      f'it has a part "a", {PARTS}')
check("part_last", None, message({"role": "user", "content": [PART, {"type": "image", "text": "a"}]}),
      f'it has a part {{"type": "image", "text": "a"}}, {PARTS}')
check("part_number", None, message({"role": "user", "content": [PART, {"type": "text", "text": 1}]}),
      f'it has a part {{"type": "text", "text": 1}}, {PARTS}')
check("content_number", message(SAYS), message({"role": "user", "content": 1}),
      "it has the content 1, but text is needed; fill it or remove the record")
check("content_none", message({"role": "user", "content": ""}), message({"role": "user"}),
      "it has the content null, but text is needed; fill it or remove the record")
IS_NONE = 'but a message is an object with "role" and "content"'
check("message_text", message(SAYS), message("a"), f'it is "a", {IS_NONE}')
check("message_role", message(SAYS), message({"role": 1, "content": "a"}), f'it is {{"role": 1, "content": "a"}}, {IS_NONE}')
check("message_from", None, message({"from": 1, "value": "a"}), f'it is {{"from": 1, "value": "a"}}, {IS_NONE}')

# ---- records of dataset_info.json, and templates by name ----


def informed(record, **said):
    return lambda: Info(said, "sft", False).converted(record)


class Bare:
    """A folder whose tokenizer has these added tokens."""
    name, bos, eos, stops = "F", 1, 2, [2]

    def __init__(self, *tokens):
        self.json, self.special = {"added_tokens": [{"id": i, "content": token} for i, token in enumerate(tokens)]}, {}

    end_with = model_folder.Folder.end_with


def named(messages, ends="assistant"):
    return lambda: NamedTemplate("qwen", Bare("<|im_end|>"), None).pairs(messages, ends)


ASKED = {"instruction": "a", "input": "", "output": "b"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
check("info_no_column", informed(ASKED), informed({"instruction": "a", "output": "b"}),
      "no key \"input\", which dataset_info has as query; keys: 'instruction', 'output'")
check("info_text", informed(ASKED), informed({**ASKED, "instruction": 1}), '"instruction" is 1, but text is needed')
check("info_tools", informed({**ASKED, "t": "[]"}, columns={"prompt": "input", "response": "output", "tools": "t"}),
      informed({**ASKED, "t": "[1]"}, columns={"prompt": "input", "response": "output", "tools": "t"}),
      "it has tools, which --template does not write; remove them, or the record")
check("info_history", informed({**ASKED, "h": [["a", "b"]]}, columns={"prompt": "input", "response": "output", "history": "h"}),
      informed({**ASKED, "h": ["a"]}, columns={"prompt": "input", "response": "output", "history": "h"}),
      '"h" is ["a"], but a list of [prompt, response] is needed')
check("info_messages", informed({"messages": TURNS}, formatting="messages", columns={"messages": "messages"}),
      informed({"messages": "a"}, formatting="messages", columns={"messages": "messages"}),
      '"messages" is "a", but a list of messages is needed')
check("info_message", informed({"messages": TURNS}, formatting="messages", columns={"messages": "messages"}),
      informed({"messages": [{"role": "user"}]}, formatting="messages", columns={"messages": "messages"}),
      '"messages"[0] is {"role": "user"}, but an object with "role" and text as "content" is needed')
check("info_calls", None, informed({"messages": [{**TURNS[0], "tool_calls": [1]}]}, formatting="messages", columns={"messages": "messages"}),
      '"messages"[0] calls a tool or is not learnt, which is not supported; remove it, or the record')
for key in ("weight", "train", "training"):
    for wrong in (0, False, 2, 0.5):
        check(f"not_learnt_{key}_{wrong}", lambda: messages.message_of({"role": "user", "content": "a", key: 1}, "it"),
              lambda: messages.message_of({"role": "user", "content": "a", key: wrong}, "it"),
              f'it has "{key}": {json.dumps(wrong)}, which says that it is not learnt; that is not supported: end the conversation '
              'before it, or leave the key out')
check("named_turns", named(TURNS), named(TURNS[:1] * 2),
      "message 2 is of user, but --template qwen writes texts of user and assistant by turns; calls are written by "
      "--apply_chat_template, or remove the record")
check("named_end", named(TURNS), named(TURNS[:1]),
      "the last of 1 messages is of user, but that of the assistant is needed; end the conversation there")
check("named_token", lambda: NamedTemplate("chatml", Bare("<|im_end|>"), None),
      lambda: NamedTemplate("chatml", Bare("</s>"), None),
      "--template chatml ends a turn with <|im_end|>, but F/tokenizer.json lacks it among its added_tokens; give the template "
      "that the model was made for, or a model that has the token")


class Worded(model_folder.Folder):
    """Of one token and its id."""

    def __init__(self, last):
        self.name, self.json = "F", {"decoder": {"type": "ByteFallback"}, "model": {"unk_id": None}}
        self.fresh = type("Fresh", (), {"get_vocab": lambda _, added: {"a": last}})()


check("last_id", lambda: Worded(9).words(), lambda: Worded(1 << 24).words(),
      "F/tokenizer.json has a token with the id 16777216, but the largest possible one is 16777215; download the file again")
model_folder.MOST_WORDS = 9  # what is just inside takes no memory then
check("last_id_inside", lambda: Worded(8).words(), lambda: Worded(9).words(),
      "F/tokenizer.json has a token with the id 9, but the largest possible one is 8; download the file again")

# ---- records ----


class Plain(Maker):
    """What reads records, without a model's folder."""

    def __init__(self, words, template=None):
        self.o = prepare.options_of(BASE + words.split())
        option_rules.settle(self.o)
        self.template, self.infos, self.counts = template, None, collections.Counter()


def record(shape, found, words="", template=None):
    kind = "" if shape == "sft" else f"--kind {shape} "
    return lambda: getattr(Plain(kind + words, template), shape)(found)


PAIR = {"chosen": "User: a\nAssistant: b", "rejected": "User: a\nAssistant: c"}
LIKED = {"input": "a", "output": "b", "label": True}
NUMBER = "but a finite number is needed; or set --margin_key"
LABEL = "but it must be true or false, 1 or 0"
check("no_key", record("sft", {"input": "a"}), record("sft", {"text": "a", "other": 1}),
      "no key \"input\"; set --input_key to one of those present: 'text', 'other'")
check("no_key_at_all", None, record("sft", {}), 'no key "input"; set --input_key to one of those present: none')
check("no_output", record("sft", LIKED, "--output_key output"), record("sft", {"input": "a"}, "--output_key output"),
      "no key \"output\"; set --output_key to one of those present: 'input'")
check("text_list", record("sft", {"input": "a"}), record("sft", {"input": [SAYS]}),
      '"input" is a list, but text is needed; lists of messages need --apply_chat_template')
check("text_number", record("sft", {"input": "1"}), record("sft", {"input": 1}), '"input" is 1, but text is needed; or set --input_key')
check("inner_key", record("sft", {"a": {"b": "c"}}, "--input_key a.b"), record("sft", {"a": {"c": "b"}}, "--input_key a.b"),
      "no key \"a.b\"; set --input_key to one of those present: 'a'")
check("alpaca_input", record("sft", {"instruction": "a", "input": None, "output": "b"}),
      record("sft", {"instruction": "a", "input": 1, "output": "b"}),
      '"input" is 1, but beside "instruction" text is needed; or set --input_key')
NEEDS = '"system" and "history" need a chat template; add --apply_chat_template, or set --input_key to leave them out'
check("alpaca_system", record("sft", {"instruction": "a", "output": "b", "system": ""}),
      record("sft", {"instruction": "a", "output": "b", "system": "s"}), NEEDS)
check("alpaca_history", record("sft", {"instruction": "a", "output": "b", "history": []}),
      record("sft", {"instruction": "a", "output": "b", "history": [["c", "d"]]}), NEEDS)
for n, past in enumerate((["c"], [["c", "d"], ["e"]], [["c", "d", "e"]], "c")):
    check(f"history_{n}", lambda: messages.alpaca_before({"history": [["c", "d"], ["e", "f"]]}),
          lambda: messages.alpaca_before({"history": past}),
          f'"history" is {json.dumps(past)}, but a list of [prompt, response] is needed')
check("tools", lambda: messages.tools_of({"tools": "[{}]"}), lambda: messages.tools_of({"tools": "{\"a\": 1}"}),
      '"tools" is {"a": 1}, but a list of functions is needed')
check("tools_text", lambda: messages.tools_of({"tools": " "}), lambda: messages.tools_of({"tools": "f"}),
      '"tools" is "f", but a list of functions is needed')
for name, margin, shown in (("true", True, "true"), ("text", "1", '"1"'), ("nan", float("nan"), "NaN"), ("infinite", float("inf"), "Infinity")):
    check(f"margin_{name}", record("pairs", {**PAIR, "margin": -1e300}), record("pairs", {**PAIR, "margin": margin}),
          f'"margin" is {shown}, {NUMBER}')
check("margin_null", record("pairs", {**PAIR, "margin": None}), record("pairs", {**PAIR, "margin": []}), f'"margin" is [], {NUMBER}')
for key in ("chosen", "rejected"):
    check(f"{key}_empty", record("pairs", PAIR), record("pairs", {**PAIR, key: ""}),
          f'"{key}" is empty, but a response needs a token; fill it or remove the record')
    check(f"{key}_text", None, record("pairs", {"chosen": [SAYS], "rejected": [SAYS], key: "a"}, "", object()),
          f'"{key}" is text without a prompt; give --prompt_key, or lists of messages')
for n, label in enumerate((2, -1, 0.5, "2", "true", None, [])):
    check(f"label_{n}", record("labelled", {**LIKED, "label": [1, 0, True, False, "1", "0", 1.0][n]}),
          record("labelled", {**LIKED, "label": label}), f'"label" is {json.dumps(label)}, {LABEL}')
check("labelled_empty", record("labelled", LIKED), record("labelled", {**LIKED, "output": ""}),
      '"output" is empty, but a response needs a token; fill it or remove the record')
for n, answer in enumerate((True, None, [1])):
    check(f"answer_{n}", record("prompts", {"input": "a", "l": [1, "", 0.5][n]}, "--label_key l"),
          record("prompts", {"input": "a", "l": answer}, "--label_key l"),
          f'"l" is {json.dumps(answer)}, but the right answer must be text or a number')
MAKER = Plain("--apply_chat_template", object())
for name, found in (("number", 1), ("empty", []), ("none", None)):
    check(f"messages_{name}", lambda: MAKER.messages({"input": [SAYS]}, "input", "input_key", "user"),
          lambda: MAKER.messages({"input": found}, "input", "input_key", "user"),
          f'"input" is {json.dumps(found)}, but text or a list of messages is needed')
check("messages_last", None, lambda: MAKER.messages({"input": [SAYS, 1]}, "input", "input_key", "user"), f'"input"[1] is 1, {IS_NONE}')
ANSWER, SYSTEM = {"role": "assistant", "content": "b"}, {"role": "system", "content": "s"}


def begins(role, one, other):
    return f'"key" begins with a message of the {role}, "{one}", which is not the prompt\'s "{other}"; leave out the key of the ' \
           'prompt if "key" holds the whole conversation'


check("joined_user", lambda: messages.joined([SAYS], [SAYS, ANSWER], "key"),
      lambda: messages.joined([SAYS], [{"role": "user", "content": "c"}, ANSWER], "key"), begins("user", "c", "a"))
check("joined_system", lambda: messages.joined([SAYS], [SYSTEM, SAYS, ANSWER], "key"),
      lambda: messages.joined([SAYS], [SYSTEM, ANSWER], "key"), begins("system", "s", "a"))

# ---- lengths: a conversation is left out where its first answer would be cut off, whatever stands behind ----


class Letters:
    """A token a letter, as tokenizers have it."""

    def __init__(self, text):
        self.ids, self.char_to_token = [ord(c) for c in text], lambda at: at
        self.token_to_chars = lambda at: (at, at + 1)


class Folder:
    eos, unknown, word = 0, None, [bytes([i]) for i in range(128)]


def chats(most, *texts):
    """Conversations, whose answers are in capitals, cut to so many tokens; refused as the program does where nothing is left."""
    maker = Plain(f"--max_len {most} --truncation cut")
    maker.folder = Folder()

    def keep():
        for text in texts:
            spans = [match.span() for match in re.finditer("[A-Z]+", text)]
            draft = Draft(text=text, spans=spans)
            maker.conversation_tokens(draft, Letters(text))
            maker.keep([draft])
        if not maker.counts["kept"]:
            raise Refused(f"nothing is left of {maker.counts['read']}, {maker.counts['dropped_long']} too long")
    return keep


TURNS = ("asksANSWERSasksAGAIN", "whyBECAUSEandSO", "aBcDeFgHiJkL")
check("chats_cut", chats(7, *TURNS), chats(3, *TURNS), "nothing is left of 3, 3 too long")
check("chat_first_answer", chats(7, TURNS[0]), chats(6, TURNS[0]), "nothing is left of 1, 1 too long")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or not passed)
