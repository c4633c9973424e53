# SPDX-License-Identifier: MIT OR Unlicense
"""What demos/prepare.py reads in records, case by case: messages, sets known by their keys, dataset_info.json, and the documents that
become of them before they are tokenized.

    test_prepare_records.py FOLDER
"""
import array
import collections
import json
import math
import types
from prepare_tables import OUT, Sentence, end, prepare, rows, write
from tokens import dataset_info, known_sets, maker as shipped, messages, option_rules
from tokens.drafts import Draft
from tokens.encoder import canonical
from tokens.model_folder import Folder
from tokens.named_template import NamedTemplate

LEFT_OUT, LAPSED = "LeftOut ", "Lapsed "


def user(said):
    return {"role": "user", "content": said}


def assistant(said, **more):
    return {"role": "assistant", "content": said, **more}


def system(said):
    return {"role": "system", "content": said}


# ---- keys and messages ----

rows("looked_up", lambda record, key: (lambda found: "missing" if found is messages.MISSING else found)(messages.looked_up(record, key)), [
    (({"a": 1}, "a"), 1), (({"a": None}, "a"), None), (({"a": 1}, "b"), "missing"), (({"a.b": 1, "a": {"b": 2}}, "a.b"), 1),
    (({"a": {"b": 2}}, "a.b"), 2), (({"a": {"b": {"c": 3}}}, "a.b.c"), 3), (({"a": {"b": 2}}, "a.c"), "missing"),
    (({"a": 5}, "a.b"), "missing"), (({"a": {"b": 5}}, "a.b.c"), "missing"), (({"a": "xb"}, "a.b"), "missing")])
F = {"name": "f"}
CALL = {"type": "function", "function": F}
NOT_JSON = "it is from function_call, but its value is not JSON: "
LONG = "x" * 80
rows("shared_gpt", messages.shared_gpt, [
    *((({"from": speaker, "value": "v"}, "it"), {"role": role, "content": "v"}) for speaker, role in (
        ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("system", "system"),
        ("observation", "tool"), ("tool", "tool"))),
    (({"from": "gpt", "value": "v", "x": 1}, "it"), {"x": 1, "role": "assistant", "content": "v"}),
    (({"from": "gpt"}, "it"), {"role": "assistant", "content": None}),
    (({"from": "function_call", "value": json.dumps(F), "x": 1}, "it"), {"x": 1, **assistant(None, tool_calls=[CALL])}),
    (({"from": "function_call", "value": json.dumps([F, F])}, "it"), assistant(None, tool_calls=[CALL, CALL])),
    (({"from": "function_call", "value": LONG}, "it"), Sentence(f'{NOT_JSON}"{LONG[:59]}')),
    (({"from": LONG}, "it"), Sentence(f'it is from "{LONG[:39]}; human, user, gpt, assistant, system, function_call, observation, tool '
                                      "are known"))])
NO_CALL = 'a tool call is {}, but it is an object with "name" and "arguments"'
rows("called", messages.called, [
    (({},), []), (({"tool_calls": None, "function_call": None},), []), (({"tool_calls": [CALL, F]},), ["f", "f"]),
    (({"tool_calls": CALL},), ["f"]), (({"function_call": F},), ["f"]), (({"tool_calls": [CALL], "function_call": {"name": "g"}},), ["f", "g"]),
    (({"tool_calls": [F, 5]},), Sentence(NO_CALL.format('[{"name": "f"}, 5]'))),
    (({"tool_calls": [{"function": 5}]},), Sentence(NO_CALL.format("[5]"))),
    (({"function_call": LONG},), Sentence(NO_CALL.format('["' + LONG[:58]))),
    (({"tool_calls": [{"x": 1}]},), Sentence(NO_CALL.format('[{"x": 1}]')))])
PART = {"type": "text", "text": "a"}
rows("content_of", messages.content_of, [
    ((user("a"), "it"), "a"), ((user(""), "it"), ""), ((user([PART, {"type": "text", "text": "b"}]), "it"), "ab"), ((user([]), "it"), ""),
    ((assistant(None, tool_calls=[CALL]), "it"), None), ((assistant("a", tool_calls=[CALL]), "it"), "a"),
    ((user([PART, {"type": LONG}]), "it"), Sentence(f'it has a part {{"type": "{LONG[:50]}, but only parts of type text can be read; remove it')),
    ((user({"a": LONG}), "it"), Sentence(f'it has the content {{"a": "{LONG[:33]}, but text is needed; fill it or remove the record'))])
rows("message_of", messages.message_of, [
    ((user("a"), "it"), user("a")), (({"from": "human", "value": "a"}, "it"), user("a")),
    (({"from": "human", "role": "assistant", "content": "a"}, "it"), {"from": "human", **assistant("a")}),
    (({"role": "user", "content": "a", "tool_calls": None, "name": None, "x": 0}, "it"), {**user("a"), "x": 0}),
    (({"role": "user", "content": [PART]}, "it"), user("a")),
    (({**user("a"), "weight": 1, "train": True}, "it"), {**user("a"), "weight": 1, "train": True}),
    ((assistant(None, tool_calls=[F]), "it"), assistant(None, tool_calls=[F])), (({**user("a"), "weight": None}, "it"), user("a")),
    ((["x" * 80], "it"), Sentence(f'it is ["{LONG[:58]}, but a message is an object with "role" and "content"')),
    (({"content": "a"}, "it"), Sentence('it is {"content": "a"}, but a message is an object with "role" and "content"'))])
HISTORY = "\"history\" is {}, but a list of [prompt, response] is needed"
rows("alpaca_before", messages.alpaca_before, [
    (({},), []), (({"system": "", "history": None},), []), (({"system": "s"},), [system("s")]),
    (({"system": "s", "history": [["a", "b"], ["c", "d"]]},), [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]),
    (({"history": [["a", "b"]]},), [user("a"), assistant("b")]),
    (({"history": [["a", "b"], ["c"]]},), Sentence(HISTORY.format('[["a", "b"], ["c"]]'))),
    (({"history": ["ab"]},), Sentence(HISTORY.format('["ab"]'))), (({"history": LONG},), Sentence(HISTORY.format(f'"{LONG[:39]}'))),
    (({"system": 5},), Sentence('"system" has the content 5, but text is needed; fill it or remove the record')),
    (({"history": [["a", 5]]},), Sentence('"history" has the content 5, but text is needed; fill it or remove the record'))])
TOOLS = '"tools" is {}, but a list of functions is needed'
rows("tools_of", lambda tools: messages.tools_of({"tools": tools}), [
    ((None,), None), (("",), None), ((" ",), None), (([],), None), (("[]",), None), (([F],), [F]), ((f" {json.dumps([F])} ",), [F]),
    (("f",), Sentence(TOOLS.format('"f"'))), (("[",), Sentence(TOOLS.format('"["'))), ((F,), Sentence(TOOLS.format('{"name": "f"}'))),
    ((5,), Sentence(TOOLS.format("5"))),
    ((LONG,), Sentence(TOOLS.format('"' + LONG[:39])))])
rows("no_tools", messages.tools_of, [(({},), None)])
rows("alike", messages.alike, [
    ((user("a"), user("a")), True), ((user(" a"), user("a\n")), True), ((user("a"), user("b")), False), ((user("a"), assistant("a")), False),
    ((assistant(None), assistant(" ")), True), ((assistant(" "), assistant(None)), True), ((assistant(None), assistant("a")), False)])


def begins(role, one, other):
    return Sentence(f'"key" begins with a message of the {role}, "{one}", which is not the prompt\'s "{other}"; leave out the key of the prompt '
                    'if "key" holds the whole conversation')


S, Q, A, R, B = system("s"), user("q"), assistant("a"), user("r"), assistant("b")
rows("joined", lambda shared, side: messages.joined(shared, side, "key"), [
    (([Q], [A]), [Q, A]), (([S, Q], [A]), [S, Q, A]), (([Q], [user(" q "), A]), [user(" q "), A]), (([S, Q], [Q, A]), [S, Q, A]),
    (([S, Q], [S, Q, A]), [S, Q, A]), (([S, Q, A, R], [R, B]), [S, Q, A, R, B]), (([Q, A, R], [Q, A, R, B]), [Q, A, R, B]),
    (([Q], [S, Q, A]), [S, Q, A]), (([R], [S, Q, A, R, B]), [S, Q, A, R, B]), (([Q, A], [S, Q, A, R, B]), [S, Q, A, R, B]),
    (([Q, A], [R, B]), [Q, A, R, B]), (([Q, A, Q], [Q, A]), [Q, A, Q, A]),
    (([Q], [R, B]), begins("user", "r", "q")), (([Q, A], [S, R]), begins("system", "s", "a")), (([Q], [S, Q]), begins("system", "s", "q")),
    (([S, Q], [S, R]), begins("system", "s", "q")),
    (([user("\u00fc" + LONG)], [user("\u00e9" + LONG)]), Sentence(
        f'"key" begins with a message of the user, "\u00e9{LONG[:38]}, which is not the prompt\'s "\u00fc{LONG[:38]}; leave out the key of the '
        'prompt if "key" holds the whole conversation'))])

# ---- sets known by their keys ----

TALK = "\n\nHuman: q\n\nAssistant:"
HH, OASST, ORCA = "Dahoas/full-hh-rlhf", "tasksource/oasst1_pairwise_rlhf_reward", "Open-Orca/OpenOrca"
ARENA, GPT = "lmsys/chatbot_arena_conversations", "openai/webgpt_comparisons"
rows("spoken", known_sets.spoken, [
    (({},), None), (({"prompt": 5},), None), (({"prompt": "q"},), None), (({"prompt": TALK},), (HH, TALK)),
    (({"prompt": TALK + " \n"},), (HH, TALK + " \n")),
    (({"prompt": "prompter:q assistant:a prompter:r"},), (OASST, "\nHuman: q \nAssistant: a \nHuman: r\nAssistant: ")),
    (({"prompt": "a prompter:"},), None)])
rows("as_lines", known_sets.as_lines, [
    (([Q, A, R], "[{}]", "k"), "[q]\na\n[r]"), (([S, Q], "[{}]", "k"), "s\n[q]"), (([], "[{}]", "k"), ""),
    ((LONG, "{}", "k"), Sentence(f'"k" is "{LONG[:39]}, but a list of messages is needed')),
    (([Q, 5], "{}", "k"), Sentence('"k"[1] is 5, but a message is an object with "role" and "content"'))])
rows("question_of", known_sets.question_of, [(({},), None), (({"question": "q"},), None), (({"question": {"full_text": "q"}},), "q"),
    (({"question": {}},), None)])
ASKS = {"system_prompt": "S", "question": "q", "response": "a"}
rows("orca", known_sets.orca, [((ASKS,), True), *((({**ASKS, key: None},), False) for key in ASKS),
    *((({**ASKS, key: ""},), True) for key in ASKS)])
CHATS = {"winner": "model_a", "conversation_a": [Q, A], "conversation_b": [Q, B]}
COMPARED = {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 1, "score_1": 0.5}
NUMBERS = '"score_0" and "score_1" are {}, but two numbers are needed'
PAIR = {"prompt": TALK, "chosen": "a", "rejected": "b"}
rows("known_pair", lambda record: known_sets.known_pair(record, "[{}]"), [
    ((CHATS,), (ARENA, None, ["[q]\na", "[q]\nb"])), (({**CHATS, "winner": "model_b"},), (ARENA, None, ["[q]\nb", "[q]\na"])),
    (({**CHATS, "winner": "tie"},), LEFT_OUT), (({**CHATS, "winner": None},), LEFT_OUT),
    *((({k: v for k, v in CHATS.items() if k != key},), None) for key in CHATS),
    ((COMPARED,), (GPT, "[q]", ["a", "b"])), (({**COMPARED, "score_1": 2},), (GPT, "[q]", ["b", "a"])),
    (({**COMPARED, "score_1": 1.0},), LEFT_OUT),
    (({**COMPARED, "score_0": "1"},), Sentence(NUMBERS.format('["1", 0.5]'))),
    (({**COMPARED, "score_1": None},), Sentence(NUMBERS.format("[1, null]"))),
    (({**COMPARED, "score_1": math.inf},), Sentence(NUMBERS.format("[1, Infinity]"))),
    (({**COMPARED, "score_0": LONG},), Sentence(NUMBERS.format('["' + LONG[:38]))),
    *((({**COMPARED, key: None},), None) for key in ("question", "answer_0", "answer_1")),
    ((PAIR,), (HH, TALK, ["a", "b"])), (({**PAIR, "prompt": "q"},), None),
    *((({k: v for k, v in PAIR.items() if k != key},), None) for key in PAIR)])
rows("known_prompt", lambda record: known_sets.known_prompt(record, "[{}]"), [
    ((ASKS,), (ORCA, "[S\nq]")), ((CHATS,), (ARENA, "[q]")), (({**CHATS, "conversation_a": [Q, A, R, B]},), (ARENA, "[q]\na\n[r]")),
    (({"winner": 1, "conversation_a": "x"},), None), (({"conversation_a": [Q, A]},), None), ((COMPARED,), (GPT, "[q]")),
    (({"question": {"full_text": "q"}},), None), (({"answer_1": "a"},), None), (({"prompt": TALK},), (HH, TALK)), (({},), None)])

# ---- templates by name ----


class Tokens:
    """A folder whose tokenizer has these added tokens, with the ids from 5 on."""
    name = "F"
    end_with = Folder.end_with

    def __init__(self, bos=1):
        self.bos, self.eos, self.stops = bos, 2, [2, 3]
        self.json = {"added_tokens": [{"id": 5 + i, "content": token} for i, token in enumerate(("<|im_end|>", "<|eot_id|>"))]}
        self.special, self.word = {}, [b"0", b"<s>", b"</s>", b"3", b"4", b"<|im_end|>", b"<|eot_id|>", b"\xff"]


def named(name, default=None, bos=1):
    return NamedTemplate(name, Tokens(bos), default)


QWEN, ZEPHYR = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "You are Zephyr, a helpful assistant."
IM = ("<|im_start|>{}\n{}<|im_end|>\n", "<|im_start|>assistant\n")
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
ASKED = HEAD.format("user") + "q<|eot_id|>" + HEAD.format("assistant")
rows("named", lambda name, messages, *more: named(name, *more).pairs(messages), [
    (("chatml", [Q, A]), [([IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("chatml", [S, Q, A, R, B]), [([IM[0].format("system", "s"), IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"]),
                                   ([IM[0].format("user", "r") + IM[1]], ["b<|im_end|>\n"])]),
    (("qwen", [Q, A]), [([IM[0].format("system", QWEN), IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("qwen", [Q, A], "d"), [([IM[0].format("system", "d"), IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("qwen", [Q, A], ""), [([IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("qwen", [S, Q, A], "d"), [([IM[0].format("system", "s"), IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("qwen", [system(""), Q, A], "d"), [([IM[0].format("system", "d"), IM[0].format("user", "q") + IM[1]], ["a<|im_end|>\n"])]),
    (("llama3", [S, Q, A]), [([1, HEAD.format("system") + "s<|eot_id|>", ASKED], ["a<|eot_id|>"])]),
    (("llama3", [Q, A], None, 0), [([0, ASKED], ["a<|eot_id|>"])]), (("llama3", [Q, A], None, -1), [([ASKED], ["a<|eot_id|>"])]),
    (("mistral", [S, Q, A, R, B]), [([1, "[INST] s\n\nq[/INST]"], [" a", 2]), (["[INST] r[/INST]"], [" b", 2])]),
    (("mistral", [Q, A]), [([1, "[INST] q[/INST]"], [" a", 2])]),
    (("zephyr", [Q, A]), [([f"<|system|>\n{ZEPHYR}", 2, "<|user|>\nq", 2, "<|assistant|>\n"], ["a", 2])]),
    (("zephyr", [Q, assistant("")], ""), [(["<|user|>\nq", 2, "<|assistant|>\n"], [2])]),
    (("chatml", [user("{} {}"), A]), [([IM[0].format("user", "{} {}") + IM[1]], ["a<|im_end|>\n"])])])


def ended(name):
    found = named(name)
    return found.folder.eos, found.folder.stops, found.tokens


rows("named_ends", ended, [
    (("chatml",), (5, [5, 2, 3], {"bos": [1], "eos": [5]})), (("llama3",), (6, [6, 2, 3], {"bos": [1], "eos": [6]})),
    (("mistral",), (2, [2, 3], {"bos": [1], "eos": [2]})), (("zephyr",), (2, [2, 3], {"bos": [1], "eos": [2]}))])


def is_of(n, role, calls=""):
    return Sentence(f"message {n} is of {role}{calls}, but --template mistral writes texts of user and assistant by turns; calls are written "
                    "by --apply_chat_template, or remove the record")


def last_is(n, role, ends):
    return Sentence(f"the last of {n} messages is of {role}, but that of the {ends} is needed; end the conversation there")


rows("named_checked", lambda messages, ends: named("mistral").checked(messages, ends), [
    (([Q, A], "assistant"), ("", [Q, A])), (([S, Q], "user"), ("s", [Q])), (([Q], "user"), ("", [Q])),
    (([Q], "assistant"), last_is(1, "user", "assistant")), (([Q, A], "user"), last_is(2, "assistant", "user")),
    (([S], "user"), last_is(1, "system", "user")), (([A], "assistant"), is_of(1, "assistant")),
    (([Q, A, A], "assistant"), is_of(3, "assistant")),
    (([S, Q, R], "user"), is_of(3, "user")), (([Q, S], "assistant"), is_of(2, "system")),
    (([Q, assistant("a", tool_calls=[F])], "assistant"), is_of(2, "assistant", " and calls a function")),
    (([Q, assistant(None)], "assistant"), is_of(2, "assistant"))])


def options(**more):
    return types.SimpleNamespace(**{"kind": "sft", "train_on": "assistant", **more})


def drawn(messages, ends="assistant", **more):
    draft = named("mistral").draft(messages, options(**more), ends)
    return draft.turns, draft.supervised, draft.last


FIRST, SECOND = ([1, "[INST] q[/INST]"], [" a", 2]), (["[INST] r[/INST]"], [" b", 2])
BOTH = [1, "[INST] q[/INST]", " a", 2, "[INST] r[/INST]"]
rows("named_draft", lambda messages, ends, more: drawn(messages, ends, **more), [
    (([Q, A, R, B], "assistant", {}), ([FIRST, SECOND], False, False)),
    (([Q, A, R, B], "assistant", {"train_on": "all"}), ([FIRST, SECOND], True, False)),
    (([Q, A], "assistant", {"train_on": "last"}), ([FIRST], False, True)), (([Q, A], "assistant", {"kind": "pairs"}), ([FIRST], False, False)),
    (([Q, A, R, B], "assistant", {"kind": "pairs"}), ([(BOTH, [" b", 2])], False, False)),
    (([Q, A, R], "user", {"kind": "prompts"}), ([(BOTH,)], False, False))])
rows("named_text", lambda turns: named("mistral").text(types.SimpleNamespace(turns=turns)),
    [(([([1, "x"], ["y", 2]), ([7], [])],), "<s>xy</s>\ufffd")])
rows("canonical", canonical, [(("\u2581A b\n\u00c9\ufb01",), "ab\u00e9fi"), (("",), "")])

# ---- dataset_info.json ----


def info(said, record, kind="sft", plain=False):
    return dataset_info.Info(said, kind, plain).converted(record)


SHARED = {"formatting": "sharegpt"}
G = {"from": "gpt", "value": "a"}
H = {"from": "human", "value": "q"}
OBSERVED, CALLED = {"from": "observation", "value": "o"}, {"from": "function_call", "value": "c"}
ALPACA = {"instruction": "i", "input": "n", "output": "o"}
rows("info_alpaca", info, [
    (({}, ALPACA), {"messages": [user("i\nn"), assistant("o")]}), (({}, {**ALPACA, "input": ""}), {"messages": [user("i"), assistant("o")]}),
    (({}, {**ALPACA, "input": None}), {"messages": [user("i"), assistant("o")]}), (({}, {**ALPACA, "output": None}), LAPSED),
    (({}, {**ALPACA, "output": ""}), {"messages": [user("i\nn"), assistant("")]}),
    (({"columns": {"prompt": "p", "response": "r", "system": "s", "history": "h"}},
     {"p": "x", "r": "y", "s": "z", "h": [["a", "b"], ["c", None]]}),
     {"messages": [system("z"), user("a"), assistant("b"), user("c"), assistant(""), user("x"), assistant("y")]}),
    (({"columns": {"prompt": "p"}}, {"p": "x"}), LAPSED), (({}, {**ALPACA, "history": [["a", "b"]]}),
     {"messages": [user("i\nn"), assistant("o")]}),
    (({"columns": {"prompt": "p", "history": "h"}}, {"p": "x", "h": [["a", "b"], ["c"]]}),
     Sentence('"h" is [["a", "b"], ["c"]], but a list of [prompt, response] is needed')),
    (({"columns": {"prompt": "p", "history": "h"}}, {"p": "x", "h": LONG}),
     Sentence(f'"h" is "{LONG[:39]}, but a list of [prompt, response] is needed')),
    (({"columns": {"prompt": "p", "history": "h"}}, {"p": "x", "h": ["ab"]}),
     Sentence('"h" is ["ab"], but a list of [prompt, response] is needed')),
    (({}, {**ALPACA, "input": [LONG]}), Sentence(f'"input" is ["{LONG[:38]}, but text is needed')),
    (({}, {}), Sentence('no key "instruction", which dataset_info has as prompt; keys: none')),
    (({"columns": {"prompt": "text"}}, {"text": "t"}, "sft", True), {"text": "t"}), (({}, ALPACA, "prompts"), {"messages": [user("i\nn")]}),
    (({"columns": {"prompt": "instruction", "kto_tag": "k", "response": "output"}}, {**ALPACA, "k": False}, "labelled"),
     {"messages": [user("i"), assistant("o")], "label": False}),
    (({"columns": {"prompt": "p", "chosen": "c", "rejected": "r"}}, {"p": "x", "c": "y", "r": "z"}, "pairs"),
     {"messages": [user("x")], "chosen": [user("x"), assistant("y")], "rejected": [user("x"), assistant("z")]})])
CHOICE = {"formatting": "sharegpt", "columns": {"messages": "m", "chosen": "c", "rejected": "r", "system": "s"}}
TAGGED = {"formatting": "openai", "columns": {"messages": "m"},
          "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "u", "assistant_tag": "a", "observation_tag": "o",
              "function_tag": "f", "system_tag": "s"}}


def tagged(*turns):
    return {"m": [{"who": who, "says": who} for who in turns]}


NO_TEXT = Sentence('"conversations"[1] is {"from": "gpt", "value": 5}, but an object with "from" and text as "value" is needed')
rows("info_shared", info, [
    ((SHARED, {"conversations": [H, G]}), {"messages": [Q, A]}),
    ((SHARED, {"conversations": [{"from": "system", "value": "s"}, H, G]}), {"messages": [S, Q, A]}),
    ((SHARED, {"conversations": [H, CALLED, OBSERVED, G]}), {"messages": [Q, {"role": "function", "content": "c"},
     {"role": "observation", "content": "o"}, A]}),
    ((SHARED, {"conversations": [H]}), LAPSED), ((SHARED, {"conversations": []}), LAPSED), ((SHARED, {"conversations": [G, H]}), LAPSED),
    ((SHARED, {"conversations": [H, G, G]}), LAPSED), ((SHARED, {"conversations": [H, {"from": "x", "value": "v"}]}), LAPSED),
    ((SHARED, {"conversations": [H, H]}), LAPSED), ((SHARED, {"conversations": [H, CALLED]}),
     {"messages": [Q, {"role": "function", "content": "c"}]}),
    ((SHARED, {"conversations": [H, G, OBSERVED]}), LAPSED),
    ((SHARED, {"conversations": "x"}), Sentence('"conversations" is "x", but a list of messages is needed')),
    ((SHARED, {"conversations": LONG}), Sentence(f'"conversations" is "{LONG[:39]}, but a list of messages is needed')),
    ((SHARED, {"conversations": [H, {"from": "gpt", "value": 5}]}), NO_TEXT), ((SHARED, {"conversations": [H, 5]}), Sentence(
        '"conversations"[1] is 5, but an object with "from" and text as "value" is needed')),
    ((SHARED, {"conversations": [LONG]}), Sentence(
        f'"conversations"[0] is "{LONG[:59]}, but an object with "from" and text as "value" is needed')),
    ((SHARED, {"conversations": [{"value": "a"}]}), Sentence('"conversations"[0] is {"value": "a"}, but an object with "from" and text as "value" is needed')),
    *(((SHARED, {"conversations": [H, {**G, **more}]}), Sentence('"conversations"[1] calls a tool or is not learnt, which is not supported; remove it, or the record'))
      for more in ({"tool_calls": [F]}, {"train": False}, {"training": False})),
    ((SHARED, {"conversations": [H, {**G, "train": None, "training": True, "tool_calls": []}]}), {"messages": [Q, A]}),
    ((CHOICE, {"m": [H], "c": G, "r": {"from": "gpt", "value": "b"}, "s": "s"}, "pairs"),
     {"messages": [S, Q], "chosen": [S, Q, A], "rejected": [S, Q, B]}),
    ((CHOICE, {"m": [H, G], "c": G, "r": G, "s": ""}, "pairs"), LAPSED), ((CHOICE, {"m": [], "c": G, "r": G, "s": ""}, "pairs"), LAPSED),
    ((CHOICE, {"m": [H], "c": G, "r": 5, "s": ""}, "pairs"), Sentence('"r" is 5, but an object with "from" and text as "value" is needed')),
    ((SHARED, {"conversations": [H]}, "prompts"), {"messages": [Q]}), ((SHARED, {"conversations": [H, G]}, "prompts"), {"messages": [Q]}),
    ((SHARED, {"conversations": [H, G, H]}, "prompts"), {"messages": [Q, A, Q]}),
    ((SHARED, {"conversations": [H, G, H, G]}, "prompts"), {"messages": [Q, A, Q]}),
    ((SHARED, {"conversations": [H, G, G]}, "prompts"), LAPSED), ((SHARED, {"conversations": [H, G]}, "sft", True), {"text": "q"}),
    ((SHARED, {"conversations": []}, "sft", True), {"text": ""}),
    ((TAGGED, tagged("s", "u", "f", "o", "a")), {"messages": [system("s"), user("u"), {"role": "function", "content": "f"},
     {"role": "observation", "content": "o"}, assistant("a")]})])
AX = {"formatting": "messages", "columns": {"messages": "m"}}
rows("info_messages", info, [
    ((AX, {"m": [S, {"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}, {"role": "other", "content": "x"}]}),
     {"messages": [S, Q, A, {"role": "other", "content": "x"}]}),
    (({**AX, "roles": {"user": ["u", "v"], "assistant": ["w"]}}, {"m": [{"role": "v", "content": "q"}, {"role": "w", "content": "a"}, Q]}),
     {"messages": [Q, A, Q]}),
    (({**AX, "tags": {"role_tag": "from", "content_tag": "value"}}, {"m": [H, G]}), {"messages": [Q, A]}),
    (({**AX, "tags": {"role_tag": "from"}}, {"m": [{"from": "human", "content": "q"}]}), {"messages": [Q]}),
    (({**AX, "columns": {"messages": "m", "chosen": "c", "rejected": "r"}}, {"m": [Q], "c": A, "r": B}, "pairs"),
     {"messages": [Q], "chosen": [Q, A], "rejected": [Q, B]}),
    (({**AX, "columns": {"messages": "m", "kto_tag": "k"}}, {"m": [Q, A], "k": 1}, "labelled"), {"messages": [Q, A], "label": 1})])
rows("info_completion", info, [
    (({"formatting": "completion", "columns": {"prompt": "t"}}, {"t": "x"}), {"text": "x"}),
    (({"formatting": "completion", "columns": {"prompt": "t"}}, {"t": None}), {"text": ""})])
TOOLED = {"columns": {"prompt": "p", "response": "r", "tools": "t"}}
HAS_TOOLS = Sentence("it has tools, which --template does not write; remove them, or the record")
rows("info_tools", lambda tools: info(TOOLED, {"p": "x", "r": "y", **tools}), [
    *(((tools,), {"messages": [user("x"), assistant("y")]}) for tools in ({}, {"t": None}, {"t": ""}, {"t": []}, {"t": "[]"})),
    *((({"t": tools},), HAS_TOOLS) for tools in ("x", [F], [0], 0.5))])


def settings(said):
    read = dataset_info.Info(said, "sft", False)
    return read.format, read.most, read.blocks, read.columns["query"], read.columns["messages"], read.tags.get("user_tag")


rows("info_defaults", settings, [
    (({},), ("alpaca", 100000000, False, "input", "conversations", "human")),
    (({"columns": {"messages": "m"}, "tags": {"role_tag": "r"}, "max_samples": 7, "blocks": True},), ("alpaca", 7, True, None, "m", None)),
    (({"formatting": "messages", "columns": {}},), ("messages", 100000000, False, None, None, None))])


def many(text, sets):
    return [(one.format, one.kind, one.plain) for one in dataset_info.infos_of(types.SimpleNamespace(dataset_info=text, dataset=sets, kind="pairs",
        pretrain_mode=True))]


COUNTED = "--dataset_info has {} objects for {} data sets; give one for each"
rows("infos_of", many, [
    (('[{}]', "a"), [("alpaca", "pairs", True)]), (('[{}, {"formatting": "sharegpt"}]', "a,b"),
     [("alpaca", "pairs", True), ("sharegpt", "pairs", True)]),
    (("{}", "a"), Sentence(COUNTED.format("no list of", 1))), (("[{}]", "a,b"), Sentence(COUNTED.format(1, 2))),
    (("[{}, 5]", "a,b"), Sentence(COUNTED.format(2, 2))),
    (("[{}, {}]", "a"), Sentence(COUNTED.format(2, 1)))])

# ---- documents of records ----

DATA = write("data.jsonl", '{"input": "a"}\n')
DEFAULTS = {slot: getattr(Draft(), slot, None) for slot in Draft.__slots__}


class Chat:
    """A chat template that writes all that it is given."""

    def settled(self, messages, tools):
        self.tools = tools
        return messages

    def render(self, messages, tools=None, prompt=False):
        assert tools == self.tools
        return " ".join([f"{m['role']}:{m['content']}" for m in messages] + [str(tools)] * bool(tools) + ["?"] * prompt)

    def turns(self, messages, tools, last):
        return self.render(messages, tools), [(0, 1)] if last else [(0, 2)]


class Maker(shipped.Maker):
    """What reads records, without a model's folder."""

    def __init__(self, words, template=None, folder=None, infos=None):
        base = ["--pretrain", "none", "--output", f"{OUT}/new.tokens", "--dataset", DATA]
        self.o = prepare.options_of(base + (words if isinstance(words, list) else words.split()))
        option_rules.settle(self.o)
        self.template, self.infos, self.folder, self.counts = template, infos, folder, collections.Counter()
        self.named = template if isinstance(template, NamedTemplate) else None

    def read(self, record):
        drafts, more = getattr(self, self.o.kind)(record)
        return [shown(draft) for draft in drafts], more


def shown(draft):
    """What a document says that others do not."""
    found = {slot: getattr(draft, slot, None) for slot in draft.__slots__}
    return {slot: value for slot, value in found.items() if value != DEFAULTS[slot] or type(value) is not type(DEFAULTS[slot])}


def reads(words, record):
    return Maker(words).read(record)


def text(said, **more):
    return [{"text": said, "prompt": "", "response": "", **more}], None


def answer(prompt, response, **more):
    return {"prompt": prompt, "response": response, "ends": True, **more}


FORM = "User: {}\nAssistant: "
KEYS = "--input_key q --output_key a "
rows("sft", reads, [
    (("", {"input": "t"}), text("t", ends=True)), (("--pretrain_mode", {"input": "t"}), text("t")),
    (("--pretrain_mode --pretrain_eos", {"input": "t"}), text("t", ends=True)),
    ((KEYS, {"q": "x", "a": "y"}), ([answer(FORM.format("x"), "y")], None)), ((KEYS, {"q": "x", "a": ""}), ([answer("", "")], None)),
    ((KEYS + "--train_on all", {"q": "x", "a": "y"}), ([answer(FORM.format("x"), "y", supervised=True)], None)),
    ((KEYS + "--input_template <{}>", {"q": "{} x", "a": "y"}), ([answer("<{} x>", "y")], None)),
    (("", ASKS), ([answer("Human: S\nq\nAssistant: ", "a")], None)),
    (("--train_on all", ASKS), ([answer("Human: S\nq\nAssistant: ", "a", supervised=True)], None)),
    (("--input_template [{}]", ASKS), ([answer("[S\nq]", "a")], None)), (("--input_key question", ASKS), text("q", ends=True)),
    (("", {"instruction": "i", "input": "n", "output": "o"}), ([answer(FORM.format("i\nn"), "o")], None)),
    (("", {"instruction": "i", "output": "o"}), ([answer(FORM.format("i"), "o")], None)),
    (("", {"instruction": "i", "input": None, "output": "o"}), ([answer(FORM.format("i"), "o")], None)),
    (("--output_key b", {"instruction": "i", "input": "n", "b": "o"}), ([answer(FORM.format("i\nn"), "o")], None)),
    (("--input_key input", {"instruction": "i", "input": "n", "output": "o"}), text("n", ends=True)),
    (("--pretrain_mode", {"instruction": "i", "input": "n", "output": "o"}), text("n")),
    (("", {"instruction": "i", "input": [LONG]}), Sentence(
        f'"input" is ["{LONG[:38]}, but beside "instruction" text is needed; or set --input_key')),
    (("", {"instruction": 5, "input": "n"}), text("n", ends=True)),
    (("", {"instruction": "i"}), Sentence("no key \"input\"; set --input_key to one of those present: 'instruction'")),
    ((KEYS, {"q": {"x": LONG}, "a": "y"}), Sentence(f'"q" is {{"x": "{LONG[:33]}, but text is needed; or set --input_key'))])
CHAT = "--apply_chat_template "


def chats(words, record):
    return Maker(CHAT + words, Chat()).read(record)


def said(written, last=False, **more):
    return {"text": written, "spans": [(0, 1)] if last else [(0, 2)], **more}


LIST = "--input_key m "
rows("chats", chats, [
    ((LIST, {"m": [Q, A]}), ([said("user:q assistant:a")], None)),
    ((LIST + "--train_on last", {"m": [Q, A]}), ([said("user:q assistant:a", True)], None)),
    ((LIST + "--train_on all", {"m": [Q, A]}), ([{"text": "user:q assistant:a", "spans": [(0, 18)]}], None)),
    ((LIST, {"m": [Q, A], "tools": [F]}), ([said("user:q assistant:a [{'name': 'f'}]")], None)),
    ((LIST + "--train_on all", {"m": [Q], "tools": [F]}), ([{"text": "user:q [{'name': 'f'}]", "spans": [(0, 22)]}], None)),
    ((KEYS, {"q": "x", "a": "y"}), ([said("user:x assistant:y")], None)),
    ((KEYS, {"q": [S, Q], "a": [A]}), ([said("system:s user:q assistant:a")], None)),
    ((LIST, {"m": Q}), ([said("user:q")], None)), ((LIST, {"m": [H, G], "system": "s"}), ([said("system:s user:q assistant:a")], None)),
    ((LIST, {"m": [{"from": "system", "value": "t"}, H], "system": "s"}), ([said("system:t user:q")], None)),
    ((LIST, {"m": [Q, A], "system": "s"}), ([said("user:q assistant:a")], None)),
    ((LIST + "--output_key m2", {"m": [H], "m2": [G], "system": "s"}), ([said("system:s user:q assistant:a")], None)),
    (("", {"instruction": "i", "input": "n", "output": "o", "system": "s", "history": [["a", "b"]]}),
     ([said("system:s user:a assistant:b user:i\nn assistant:o")], None)),
    ((LIST, {"m": {}}), Sentence('"m"[0] is {}, but a message is an object with "role" and "content"')),
    ((LIST, {"m": 10 ** 50}), Sentence(f'"m" is 1{"0" * 39}, but text or a list of messages is needed')),
    ((LIST, {"m": 0.5}), Sentence('"m" is 0.5, but text or a list of messages is needed'))])


def pair(words, record):
    drafts, margin = Maker("--kind pairs " + words).read(record)
    return drafts, str(margin)


def sides(prompt, one, other, margin="nan"):
    return [answer(prompt, one), answer(prompt, other)], margin


rows("pairs", pair, [
    (("--prompt_key p", {"p": "x", "chosen": "y", "rejected": "z"}), sides(FORM.format("x"), "y", "z")),
    (("--prompt_key p --chosen_key c --rejected_key r", {"p": "x", "c": "y", "r": "z"}), sides(FORM.format("x"), "y", "z")),
    (("", {"chosen": "We say y", "rejected": "We say z"}), sides("We say", " y", " z")),
    (("", {"chosen": "a y", "rejected": "b z", "prompt": ""}), sides("", "a y", "b z")),
    (("", {"chosen": "q y", "rejected": "q z", "prompt": "q"}), sides("q", " y", " z")),
    (("", PAIR), sides(TALK, "a", "b")), (("", COMPARED), sides("Human: q\nAssistant: ", "a", "b")),
    (("", CHATS), sides("Human: q\nAssistant:", " \na", " \nb")),
    (("--input_template [{}]", COMPARED), sides("[q]", "a", "b")),
    (("--margin_key g", {"chosen": "We y", "rejected": "We z", "g": 2}), sides("We", " y", " z", "2.0")),
    (("", {"chosen": "We y", "rejected": "We z", "margin": -0.5}), sides("We", " y", " z", "-0.5")),
    (("--margin_key g.h", {"chosen": "We y", "rejected": "We z", "g": {"h": 0}}), sides("We", " y", " z", "0.0")),
    (("", {"instruction": "i", "input": "n", "chosen": "y", "rejected": "z"}), sides(FORM.format("i\nn"), "y", "z")),
    (("--prompt_key instruction", {"instruction": "i", "input": "n", "chosen": "y", "rejected": "z"}), sides(FORM.format("i"), "y", "z")),
    (("", {"prompt": "w", "chosen": "y", "rejected": "z"}), Sentence('there is a "prompt", but the answers do not begin with it; give --prompt_key prompt')),
    (("", {"chosen": "y", "rejected": "z", "margin": LONG}), Sentence(
        f'"margin" is "{LONG[:39]}, but a finite number is needed; or set --margin_key')),
    (("", {"chosen": "y"}), Sentence("no key \"rejected\"; set --rejected_key to one of those present: 'chosen'")),
    (("--prompt_key p", {"chosen": "y", "rejected": "z"}), Sentence("no key \"p\"; set --prompt_key to one of those present: 'chosen', 'rejected'"))])


def pair_of_chats(words, record):
    maker = Maker("--kind pairs --apply_chat_template " + words, Chat())
    return [draft["text"] for draft in maker.read(record)[0]], maker.counts["asked_twice"]


def asked_twice(words, record, template=None):
    maker = Maker("--kind pairs " + words, template)
    maker.read(record)
    return maker.counts["asked_twice"]


BOTH_SIDES = {"chosen": [Q, A], "rejected": [Q, B]}
rows("pair_of_chats", pair_of_chats, [
    (("", BOTH_SIDES), (["user:q assistant:a", "user:q assistant:b"], 0)),
    (("--prompt_key p", {"p": "x", "chosen": "y", "rejected": "z"}), (["user:x assistant:y", "user:x assistant:z"], 0)),
    (("--prompt_key p", {"p": [S, Q], "chosen": [Q, A], "rejected": B}), (["system:s user:q assistant:a", "system:s user:q assistant:b"], 0)),
    (("--prompt_key p", {"p": "x", "chosen": "x y", "rejected": "x z"}), (["user:x assistant:x y", "user:x assistant:x z"], 1)),
    (("--prompt_key p", {"p": "x", "chosen": "x y", "rejected": "z"}), (["user:x assistant:x y", "user:x assistant:z"], 0)),
    (("", {"instruction": "i", "input": "n", "chosen": "y", "rejected": "z"}), (["user:i\nn assistant:y", "user:i\nn assistant:z"], 0)),
    (("", {**BOTH_SIDES, "chosen": [Q]}), Sentence('"chosen" ends with a message of user, but a pair is about the assistant\'s last; end it there')),
    (("", {**BOTH_SIDES, "rejected": [Q, A, R]}), Sentence('"rejected" ends with a message of user, but a pair is about the assistant\'s last; end it there')),
    (("--prompt_key p", {**BOTH_SIDES, "p": "w"}), Sentence(begins("user", "q", "w").replace('"key"', '"chosen"')))])
rows("pair_trims", lambda: [(d["trims"], d["spans"]) for d in Maker("--kind pairs --apply_chat_template", Chat()).read(BOTH_SIDES)[0]],
    [((), [(True, [(0, 1)])] * 2)])
rows("asked_twice", asked_twice, [
    (("--prompt_key p", {"p": "x", "chosen": "x y", "rejected": "x z"}), 1),
    (("--prompt_key p", {"p": "x", "chosen": "x y", "rejected": "z"}), 0),
    (("--prompt_key p", {"p": "x", "chosen": "y", "rejected": "x z"}), 0), (("--prompt_key p", {"p": "", "chosen": "y", "rejected": "z"}), 0),
    (("--prompt_key p --apply_chat_template", {"p": "", "chosen": "y", "rejected": "z"}, Chat()), 0),
    (("--prompt_key p --apply_chat_template", {"p": Q, "chosen": [Q, A], "rejected": [Q, B]}, Chat()), 0),
    (("--prompt_key p --apply_chat_template", {"p": "q", "chosen": assistant(None, tool_calls=[F]), "rejected": "q"}, Chat()), 0)])


def labelled(words, record, template=None):
    return Maker("--kind labelled " + words, template).read(record)


rows("labelled", labelled, [
    *((("", {"input": "x", "output": "y", "label": label}), ([answer(FORM.format("x"), "y")], liked)) for label, liked in (
        (True, 1), (False, 0), (1, 1), (0, 0), ("1", 1), ("0", 0), (1.0, 1))),
    (("--input_key q --output_key a --label_key l", {"q": "x", "a": "y", "l": 1}), ([answer(FORM.format("x"), "y")], 1)),
    (("", {"instruction": "i", "input": "n", "output": "y", "label": 0}), ([answer(FORM.format("i\nn"), "y")], 0)),
    ((CHAT, {"input": "x", "output": "y", "label": 1}, Chat()), ([said("user:x assistant:y", True, trims=True)], 1)),
    ((CHAT, {"input": [Q, A], "label": 0}, Chat()), ([said("user:q assistant:a", True, trims=True)], 0)),
    ((CHAT, {"input": [Q], "output": [A], "label": 0}, Chat()), ([said("user:q assistant:a", True, trims=True)], 0)),
    ((CHAT, {"input": "x", "label": 0}, Chat()), Sentence("no key \"output\"; set --output_key to one of those present: 'input', 'label'")),
    (("", {"input": "x", "output": "y", "label": {"a": LONG}}),
     Sentence(f'"label" is {{"a": "{LONG[:33]}, but it must be true or false, 1 or 0'))])


def prompts(words, record, template=None):
    return Maker(["--kind", "prompts", *words], template).read(record)


def asks(prompt, label=""):
    return [{"prompt": prompt, "response": ""}], (prompt, label)


rows("prompts", prompts, [
    (([], {"input": "x"}), asks(FORM.format("x"))), ((["--input_key", "q"], {"q": "x"}), asks(FORM.format("x"))),
    *(((["--label_key", "l"], {"input": "x", "l": label}), asks(FORM.format("x"), told)) for label,
     told in (("5", "5"), (5, "5"), (7.5, "7.5"), ("", ""), (0, "0"))),
    ((["--csft_prompt", " great "], {"input": "x"}), asks(FORM.format("x") + "great ")),
    ((["--csft_prompt", ""], {"input": "x"}), asks(FORM.format("x") + " ")),
    (([], ASKS), asks("Human: S\nq\nAssistant: ")), (([], {"prompt": TALK}), asks(TALK)),
    ((["--csft_prompt", "g"], {"prompt": TALK}), asks(TALK + "g ")),
    (([], {"instruction": "i", "input": "n", "output": "o"}), asks(FORM.format("i\nn"))),
    ((["--apply_chat_template"], {"input": [Q]}, Chat()), ([{"text": "user:q ?", "spans": []}], ("user:q ?", ""))),
    ((["--apply_chat_template", "--csft_prompt", "g"], {"input": "x", "tools": [F]}, Chat()),
     ([{"text": "user:x [{'name': 'f'}] ?g ", "spans": []}], ("user:x [{'name': 'f'}] ?g ", ""))),
    ((["--label_key", "l"], {"input": "x", "l": [LONG]}), Sentence(f'"l" is ["{LONG[:38]}, but the right answer must be text or a number'))])
rows("prompts_named", lambda record: prompts(["--template", "mistral", "--label_key", "l"], record, named("mistral")), [
    (({"input": [Q], "l": 1},), ([{"turns": [([1, "[INST] q[/INST]"],)]}], ("<s>[INST] q[/INST]", "1"))),
    (({"input": "q", "l": ""},), ([{"turns": [([1, "[INST] q[/INST]"],)]}], ("<s>[INST] q[/INST]", ""))),
    (({"input": [Q, A], "l": ""},), last_is(2, "assistant", "user"))])


def known(words, record):
    maker = Maker(words)
    maker.read(record)
    return {key: n for key, n in maker.counts.items() if key.startswith("set ")}


rows("known", known, [
    (("", ASKS), {f"set {ORCA}": 1}), (("", {**ASKS, "input": "x"}), {}), (("--input_key question", ASKS), {}),
    (("--kind prompts", {"prompt": TALK}), {f"set {HH}": 1}),
    (("--kind prompts", {"prompt": TALK, "input": "x"}), {}), (("--kind pairs", PAIR), {f"set {HH}": 1}),
    (("--kind pairs --prompt_key prompt", PAIR), {}),
    (("--kind pairs", {"chosen": "a", "rejected": "b"}), {})])

# ---- plain text of dataset_info.json ----


class Plain:
    """A folder that says these of its tokenizer."""

    def __init__(self, special, config):
        self.special, self.config = special, config


BOTH_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
INFO = '--template {} --dataset_info [{{"columns":{{"prompt":"p"}},"blocks":{}}}] --pretrain_mode'


def whole_text(mode, special, config, template=None, blocks="false"):
    words = (INFO.format(template or "mistral", blocks) if mode else '--dataset_info [{"formatting":"completion"}]').split()
    maker = Maker(words, named(template) if template else None, Plain(special, config), None)
    maker.infos = dataset_info.infos_of(maker.o)
    return maker.read({"text": "t"})


def turn(written):
    return [{"turns": [([], [written])]}], None


rows("whole_text", whole_text, [
    ((False, BOTH_ENDS, {}), ([{"text": "t", "ends": True}], None)), ((True, BOTH_ENDS, {}), turn("t</s>")),
    ((True, BOTH_ENDS, {"add_bos_token": True}), turn("<s>t</s>")),
    ((True, BOTH_ENDS, {"tokenizer_class": "LlamaTokenizer"}), turn("<s>t</s>")),
    ((True, BOTH_ENDS, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}), turn("t</s>")),
    ((True, {"eos_token": "</s>", "bos_token": ""}, {"add_bos_token": True}), turn("t</s>")),
    ((True, {"eos_token": "</s>"}, {}), turn("t</s>")), ((True, {"eos_token": "</s>"}, {"add_bos_token": True}), turn("t</s>")),
    ((True, BOTH_ENDS, {"add_bos_token": True}, "llama3"), turn("<s>t<|end_of_text|>")),
    ((True, BOTH_ENDS, {"add_bos_token": True}, "mistral"), turn("<s>t</s>")),
    ((True, BOTH_ENDS, {"add_bos_token": True}, None, "true"), turn("t</s>"))])


def blocks(infos):
    maker = Maker("")
    maker.infos = infos
    return maker.blocks()


rows("blocks", blocks, [
    ((None,), False), (([dataset_info.Info({}, "sft", True)],), False),
    (([dataset_info.Info({"blocks": True}, "sft", True), dataset_info.Info({}, "sft", True)],), True)])


def parted(ids, most):
    maker = Maker(f"--max_len {most}")
    draft = Draft()
    draft.ids = ids
    return [(part.ids, list(part.mask), part.prompt_tokens) for part in maker.parted(draft)]


ONES = [1, 1, 1]
rows("parted", parted, [
    (([5, 6, 7], 3), [([5, 6, 7], ONES, 0)]), (([5, 6, 7], 4), [([5, 6, 7], ONES, 0)]),
    (([5, 6, 7, 8, 9], 3), [([5, 6, 7], ONES, 0), ([8, 9], [1, 1], 0)]),
    (([5, 6, 7, 8], 3), [([5, 6, 7], ONES, 0)]), (([5, 6, 7], 0), [([5, 6, 7], ONES, 0)]), (([5], 3), [])])
rows("parted_most", lambda count: [(ids[0], len(ids)) for ids, _, _ in parted(list(range(count)), 2)][-1],
    [((128,), (126, 2)), ((129,), (126, 2)), ((131,), (126, 2)), ((127,), (124, 2))])

# ---- steps ----


class Marks:
    """A tokenizer of letters, and of <m>."""

    def encode_batch(self, texts, add_special_tokens):
        if any("\ud800" in text for text in texts):
            raise TypeError
        texts = [text.replace("<m>", "\u012c") for text in texts]
        return [types.SimpleNamespace(ids=[ord(c) for c in text if not add_special_tokens]) for text in texts]


def stepper(marks="+ -"):
    maker = Maker(["--kind", "steps", "--placeholder_token", "#", *(["--reward_tokens", *marks.split()] if marks else [])], None,
        types.SimpleNamespace(fresh=Marks()))
    maker.placeholder, maker.choices = 35, {one: ord(one) for one in marks.split()}
    return maker


rows("token", lambda text: stepper().token(text, "WHAT"), [
    (("a",), 97), (("<m>",), 300), (("ab",), Sentence("WHAT: 'ab' is 2 tokens, [97, 98]; give a text that is one")),
    (("",), Sentence("WHAT: '' is 0 tokens, []; give a text that is one")),
    (("a" * 9,), Sentence(f"WHAT: 'aaaaaaaaa' is 9 tokens, {[97] * 8}; give a text that is one")),
    (("\ud800",), Sentence("a text holds half a character (a lone surrogate such as \\ud800); remove it"))])
rows("step_label", lambda label, marks: stepper(marks).step_label(label, "it"), [
    (("+", "+ -"), (43, 1.0)), (("-", "+ -"), (45, 1.0)), (("-", "+ - ="), (45, 1.0)), (("a", ""), (97, 1.0)), ((0.25, "+ -"), (43, 0.25)),
    ((0, "+ -"), (43, 0.0)),
    ((1, "+ -"), (43, 1.0)), ((True, "- +"), (45, 1.0)), (("x", "+ -"), Sentence('it is "x", which is none of --reward_tokens + -')),
    (("x" * 80, "+ -"), Sentence(f'it is "{LONG[:39]}, which is none of --reward_tokens + -')),
    (([LONG], "+ -"), Sentence(f'it is ["{LONG[:38]}, but a token or a number is needed')),
    (("ab", ""), Sentence("it: 'ab' is 2 tokens, [97, 98]; give a text that is one")),
    ((None, "+ -"), Sentence("it is null, but a token or a number is needed")),
    ((0.5, "+ - ="), Sentence("it is 0.5, a soft label (the probability of the first of two tokens), but --reward_tokens names 3; name two, or give tokens as labels")),
    ((0.5, ""), Sentence("it is 0.5, a soft label (the probability of the first of two tokens), but --reward_tokens names 0; name two, or give tokens as labels")),
    ((10 ** 50, "+ -"), Sentence(f"it is 1{'0' * 39}, but a soft label must be from 0 to 1")),
    ((10 ** 50, "+ - ="), Sentence(f"it is 1{'0' * 39}, a soft label (the probability of the first of two tokens), but --reward_tokens names 3; name two, or give tokens as "
                               "labels")),
    ((-0.25, "+ -"), Sentence("it is -0.25, but a soft label must be from 0 to 1")),
    ((1.25, "+ -"), Sentence("it is 1.25, but a soft label must be from 0 to 1"))])


def steps(text, labels):
    drafts, more = stepper().steps({"input": text, "label": labels})
    return [(draft.text, draft.labels, draft.ends) for draft in drafts], more


rows("steps", steps, [
    (("a#b#", ["+", 0.5]), ([("a#b#", [(43, 1.0), (43, 0.5)], False)], None)), (("a", []), ([("a", [], False)], None)),
    (("a#", "+"), Sentence('"label" is "+", but a list is needed, a label for each step')),
    (("a#", LONG), Sentence(f'"label" is "{LONG[:39]}, but a list is needed, a label for each step')),
    (("a#", ["+", "x"]), Sentence('label[1] is "x", which is none of --reward_tokens + -'))])


def built(words):
    """What a maker has, whatever a folder and its template are."""
    instead = {"Folder": lambda name: types.SimpleNamespace(name=name, fresh=Marks()),
        "NamedTemplate": lambda *given: ["named", given[0], given[1].name, *given[2:]],
               "Template": lambda text, folder, now: ["chat", text, folder.name, now], "template_text": lambda given,
               folder: (given, folder.name)}
    whole = {name: getattr(shipped, name) for name in instead}
    o = prepare.options_of(["--pretrain", "P", "--output", f"{OUT}/new.tokens", "--dataset", DATA, *words.split()])
    option_rules.settle(o)
    vars(shipped).update(instead)
    try:
        maker = shipped.Maker(o, "now")
    finally:
        vars(shipped).update(whole)
    return maker.named, maker.template, maker.infos and len(maker.infos), maker.shape.__name__, getattr(maker, "placeholder",
        None), getattr(maker, "choices", None)


STEPS, NAMED = "--kind steps --placeholder_token #", ["named", "qwen", "P", None]
rows("maker", built, [
    *(((f"--kind {kind}",), (None, None, None, kind, None, None)) for kind in ("sft", "pairs", "labelled", "prompts")),
    (("--template qwen",), (NAMED, NAMED, None, "sft", None, None)),
    (("--template qwen --default_system s --dataset_info [{}]",), (NAMED[:3] + ["s"], NAMED[:3] + ["s"], 1, "sft", None, None)),
    (("--apply_chat_template --tokenizer_chat_template x",), (None, ["chat", ("x", "P"), "P", "now"], None, "sft", None, None)),
    ((STEPS,), (None, None, None, "steps", 35, {})),
    ((STEPS + " --reward_tokens + -",), (None, None, None, "steps", 35, {"+": 43, "-": 45})),
    ((STEPS + " --reward_tokens + - +",), Sentence("--reward_tokens + - + are not all different tokens; name each once")),
    (("--kind steps --placeholder_token ab",), Sentence("--placeholder_token: 'ab' is 2 tokens, [97, 98]; give a text that is one")),
    ((STEPS + " --reward_tokens + ab",), Sentence("--reward_tokens: 'ab' is 2 tokens, [97, 98]; give a text that is one"))])


def step_tokens(ids, count):
    draft = Draft(text="t")
    draft.labels = [None] * count
    stepper().step_tokens(draft, ids)
    return draft.ids, list(draft.mask), draft.prompt_tokens


NO_PLACE = Sentence("the text has no placeholder '#' as a token of its own, so no step has a label; put it after each step, or name another by "
                    "--placeholder_token")
rows("step_tokens", step_tokens, [
    (([97, 35, 35], 2), ([97, 35, 35], [0, 1, 1], 0)), (([], 0), ([], [], 0)), (([], 2), ([], [], 0)), (([97], 0), NO_PLACE),
    (([97, 98], 1), NO_PLACE),
    (([35], 2), Sentence("2 labels in \"label\" for 1 placeholders '#'; give one for each")),
    (([35, 35], 1), Sentence("1 labels in \"label\" for 2 placeholders '#'; give one for each"))])


def step_sections(*documents):
    drafts = []
    for mask, labels in documents:
        drafts.append(Draft())
        drafts[-1].mask, drafts[-1].labels = bytearray(mask), labels
    found = stepper().step_sections(drafts)
    return {name: [list(array.array("i" if name == 15 else "f", data))] for name, data in found.items()}


rows("step_sections", step_sections, [
    ((([0, 1, 1], [(43, 0.5), (45, 1.0)]), ([1, 0], [(45, 0.25)])), {15: [[-100, 43, 45, 45, -100]], 16: [[0.0, 0.5, 1.0, 0.25, 0.0]]})])
end()
