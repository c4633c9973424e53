# SPDX-License-Identifier: MIT OR Unlicense
"""demos/prepare.py: tokens and masks against the tokenizer itself and against transformers, where that is; the table of words, the
boundaries of turns, what is refused, the same bytes by any number of processes, and the trainers upon what it wrote.

    test_prepare.py FOLDER [DATA]     DATA: a folder with gsm8k_train.jsonl and gsm8k_preferences.jsonl
"""
import collections
import contextlib
import datetime
import gzip
import http.server
import io
import json
import math
import os
import random
import struct
import subprocess
import sys
import threading
import time
import traceback
import zlib

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "demos"))
import prepare  # noqa: E402
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers  # noqa: E402
from tokenizers import pre_tokenizers, processors, trainers  # noqa: E402
from tokens import chat_template, data_sets, model_folder, processes, token_file  # noqa: E402
from tokens.base import Refused  # noqa: E402
from tokens.reader import common_prompt  # noqa: E402

try:
    from transformers import PreTrainedTokenizerFast
except ImportError:
    PreTrainedTokenizerFast = None

OUT, DATA = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] + "
          "'<|im_end|>' }}END{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
LLAMA3 = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
          "{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] | trim + '<|eot_id|>' }}END{% else %}"
          "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
          "{% elif m['role'] == 'assistant' %}BEGIN{{ ' ' + m['content'] + ' ' + eos_token }}END{% else %}"
          "{{ raise_exception('no system here') }}{% endif %}{% endfor %}")


def template(text, marked):
    return text.replace("BEGIN", "{% generation %}" if marked else "").replace("END", "{% endgeneration %}" if marked else "")


# ---- tokenizers, trained here ----

WORDS = "the answer is a number of pens and coins that Mia has found, sold or given away; how many are left? \n".split(" ")
ODD = ["\U0001F600", "\U0001F469\u200D\U0001F680", "e\u0301", "\u00e9", "\n", "\n\n", "  ", "   lead", "\t", "\u4f60\u597d",
       "\u05e9\u05dc", "\u2581", "x" * 30, "12,345.6", "'s", "don't", "<|im_end|>x"[11:], "\u00a0", "\u2028", "\U0001D11E"]


def texts(seed, count, odd=0.3):
    draw = random.Random(seed)
    for _ in range(count):
        words = [draw.choice(ODD if draw.random() < odd else WORDS) for _ in range(draw.randint(1, 12))]
        yield draw.choice(["", " ", "\n"]) + draw.choice([" ", " ", ""]).join(words)


def write(folder, tokenizer, config, generation=None, prefix=None):
    os.makedirs(folder, exist_ok=True)
    if prefix:
        special = [(prefix, tokenizer.token_to_id(prefix))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{prefix} $A", special_tokens=special)
    tokenizer.save(f"{folder}/tokenizer.json")
    for name, what in (("tokenizer_config", config), ("generation_config", generation)):
        if what:
            with open(f"{folder}/{name}.json", "w") as file:
                json.dump(what, file)


# Llama 3's and Qwen's: new lines are never parted.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(folder, specials, config, pattern=PATTERN, **more):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None), decoders.ByteLevel()
    if pattern:
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), t.pre_tokenizer])
    t.train_from_iterator(list(texts(1, 400)), trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False,
                                                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_tokens([AddedToken("<t\u00f6\u00f6l>", special=False)])
    write(folder, t, config, **more)


FALLBACK = [f"<0x{b:02X}>" for b in range(256)]


def like_llama2(folder, config):
    """BPE with byte fallback, a space put before every text by the normalizer."""
    t = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces = pre_tokenizers.Metaspace(prepend_scheme="never")
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), spaces])
    t.train_from_iterator(list(texts(2, 300, 0.0)), trainers.BpeTrainer(vocab_size=500, show_progress=False,
                                                                        special_tokens=["<unk>", "<s>", "</s>"] + FALLBACK))
    t.pre_tokenizer = None
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    write(folder, plain_fallback(t), config, prefix="<s>")


def plain_fallback(tokenizer):
    """Trained as special tokens to have them at all; but bytes are none."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] not in FALLBACK]
    return Tokenizer.from_str(json.dumps(content))


def unigram(folder, config):
    """Pieces with byte fallback, a space put before every text by the pre-tokenizer."""
    draw = random.Random(3)
    pieces = {piece for text in texts(3, 200, 0.0) for word in text.split(" ") for n in range(1, 5)
              for piece in (("\u2581" + word)[i:i + n] for i in range(len(word) + 1)) if "\n" not in piece}
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)] + [(b, -20.0) for b in FALLBACK]
    vocabulary += [(piece, -9.0 + len(piece) + draw.random()) for piece in sorted(pieces)]
    t = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    write(folder, t, config, prefix="<s>")


FOLDERS = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2, "unigram": LLAMA2}


def folder(name):
    return f"{OUT}/{name}"


def make_folders():
    for marked in (True, False):
        end = "" if marked else "_plain"
        byte_level(folder("chatml" + end), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], generation={"eos_token_id": [2, 0]},
                   config={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template(CHATML, marked)})
        byte_level(folder("llama3" + end), ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], prefix="<|bos|>",
                   config={"bos_token": "<|bos|>", "eos_token": {"content": "<|eot_id|>"},
                           "chat_template": template(LLAMA3, marked)})
        sentence = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template(LLAMA2, marked)}
        like_llama2(folder("llama2" + end), sentence)
        unigram(folder("unigram" + end), sentence)


# ---- what prepare.py wrote ----


class Read:
    """A token file, by the comment at the head of demos/trainer/data/token_file.h."""

    def __init__(self, path):
        with open(path, "rb") as file:
            raw = file.read()
        assert raw[:8] == b"\x89SEQTOK\n"
        (version, crc, size, self.kind, count, self.bos, self.eos, self.pad, self.vocab, documents, tokens, self.tokenizer_size,
         self.tokenizer_crc) = struct.unpack_from("<IIQIIiiiiQQQI", raw, 8)
        assert (version, size, crc) == (1, len(raw), zlib.crc32(raw[16:96 + 32 * count]))
        self.raw, self.sections = raw, {}
        for i in range(count):
            name, crc, begin, size, _ = struct.unpack_from("<IIQQQ", raw, 96 + 32 * i)
            self.sections[name] = raw[begin:begin + size]
            assert begin % 64 == 0 and zlib.crc32(self.sections[name]) == crc
        offsets = self.numbers(token_file.OFFSETS, "Q")
        ids, mask = self.numbers(token_file.IDS, "i"), self.sections[token_file.MASK]
        self.ids = [list(ids[a:b]) for a, b in zip(offsets, offsets[1:])]
        self.mask = [list(mask[a:b]) for a, b in zip(offsets, offsets[1:])]
        assert len(self.ids) == documents and len(ids) == len(mask) == tokens
        self.stops = list(self.numbers(token_file.STOPS, "i"))
        self.words, self.flags = self.texts(token_file.WORD_OFFSETS, token_file.WORDS), self.sections[token_file.WORD_FLAGS]
        self.about = json.loads(self.sections[token_file.ABOUT])

    def numbers(self, name, code):
        return struct.unpack(f"<{len(self.sections[name]) // struct.calcsize(code)}{code}", self.sections[name])

    def texts(self, offsets, texts):
        at = self.numbers(offsets, "Q")
        return [self.sections[texts][a:b] for a, b in zip(at, at[1:])]

    def text(self, ids):
        return b"".join(self.words[i] for i in ids).decode(errors="replace")

    def learnt(self, i):
        """The texts that are learnt of a document, one for each run of tokens."""
        runs, inside = [], False
        for token, on in zip(self.ids[i], self.mask[i]):
            if on and not inside:
                runs.append([])
            if on:
                runs[-1].append(token)
            inside = on
        return [self.text(run) for run in runs]


def lines(name, records):
    path = f"{OUT}/{name}.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write((record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n")
    return path


def run(model, data, *more, kind="sft", workers=1, out="out"):
    path = f"{OUT}/{out}.tokens"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        prepare.prepare(["--pretrain", folder(model), "--dataset", data, "--output", path, "--kind", kind, "--overwrite",
                         "--workers", str(workers), *more])
    read = Read(path)
    read.said = said.getvalue()
    return read


def refused(part, model, data, *more, kind="sft"):
    """It must be, by a sentence with these words, and nothing be written."""
    path = f"{OUT}/refused.tokens"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare.prepare(["--pretrain", folder(model), "--dataset", data, "--output", path, "--kind", kind, "--workers", "1",
                             *more])
    except Refused as why:
        assert part in str(why), f"'{why}' instead of: {part}"
        assert not [name for name in os.listdir(OUT) if name.startswith("refused")], "something was written"
        return
    raise AssertionError(f"was taken, instead of: {part}")


def conversation(turns, *contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": contents[i] if i < len(contents) else f"turn {i}"} for i in range(turns)]


CHAT = ["--input_key", "messages", "--apply_chat_template"]


def conversations(seed, count, turns=(2, 4, 6)):
    draw, said = random.Random(seed), list(texts(seed, 6 * count))
    return [{"messages": [{"role": ("user", "assistant")[i % 2], "content": draw.choice(said).strip() or "yes"}
                          for i in range(draw.choice(turns))]} for _ in range(count)]


# ---- tests ----


def test_words():
    data = lines("one", [{"input": "a", "output": "b"}])
    for name in FOLDERS:
        read, tokenizer = run(name, data, "--output_key", "output"), Tokenizer.from_file(f"{folder(name)}/tokenizer.json")
        assert read.vocab == tokenizer.get_vocab_size(True) == len(read.words)
        for text in texts(4, 400):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            told = read.text(ids)
            if name in ("llama2", "unigram"):  # a space stands before a text, which decoding takes away
                there, text = name == "unigram" and text[0] in " \u2581", text.replace("\u2581", " ")
                text = text if there else " " + text
            assert told == text, (name, text, told)
            decoded = told[1:] if told[:1] == " " and name in ("llama2", "unigram") else told
            assert decoded == tokenizer.decode(ids), (name, told, tokenizer.decode(ids))
        for special in json.loads(tokenizer.to_str())["added_tokens"]:
            assert read.words[special["id"]].decode() == special["content"] and read.flags[special["id"]] == special["special"]
        with open(f"{folder(name)}/tokenizer.json", "rb") as file:
            raw = file.read()
        assert (read.tokenizer_size, read.tokenizer_crc) == (len(raw), zlib.crc32(raw))


def test_special_ids():
    data = lines("one", [{"input": "a", "output": "b"}])
    read = run("chatml", data, "--output_key", "output")
    assert (read.bos, read.eos, read.pad, read.stops) == (-1, 2, 0, [2, 0])
    assert "add_bos_token" not in read.said
    read = run("llama3", data, "--output_key", "output")
    assert (read.bos, read.eos, read.pad, read.stops) == (0, 3, -1, [3])


def test_against_transformers():
    if PreTrainedTokenizerFast is None:
        raise Absent("no transformers")
    for name in FOLDERS:
        records = conversations(5, 120)
        data = lines("chats", records)
        theirs = PreTrainedTokenizerFast(tokenizer_file=f"{folder(name)}/tokenizer.json", **{
            key: model_folder.token_text(value) for key, value in model_folder.read_json(folder(name), "tokenizer_config.json").items()})
        marked, plain = run(name, data, *CHAT), run(name + "_plain", data, *CHAT)
        assert len(marked.ids) == len(records)
        for i, record in enumerate(records):
            want = theirs.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
            assert marked.ids[i] == list(want["input_ids"]) == plain.ids[i], (name, i)
            assert marked.mask[i] == list(want["assistant_masks"]), (name, i, marked.learnt(i))
            assert plain.mask[i] == marked.mask[i], (name, i, plain.learnt(i), marked.learnt(i))
        prompts = [{"messages": record["messages"][:-1]} for record in records]
        asked = run(name + "_plain", lines("asked", prompts), *CHAT, kind="prompts")
        for i, record in enumerate(prompts):
            want = theirs.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=True)
            assert asked.ids[i] == list(want["input_ids"]), (name, i)


def test_turns():
    """What is learnt of each turn, and by --train_on."""
    record = [{"messages": conversation(4, "How many?", "First \U0001F600", "And now?", "Second\n\nline e\u0301")}]
    data = lines("turns", record)
    ends = {"chatml": "{}<|im_end|>", "llama3": "{}<|eot_id|>", "llama2": " {} </s>", "unigram": " {} </s>"}
    for name, end in ends.items():
        for model in (name, name + "_plain"):
            want = [end.format(record[0]["messages"][k]["content"]) for k in (1, 3)]
            assert run(model, data, *CHAT).learnt(0) == want, (model, run(model, data, *CHAT).learnt(0))
            assert run(model, data, *CHAT, "--train_on", "last").learnt(0) == want[1:], model
            whole = run(model, data, *CHAT, "--train_on", "all")
            assert whole.mask[0] == [0] + [1] * (len(whole.ids[0]) - 1), model


def test_torn_characters():
    """What is learnt ends in a character of several tokens: all of them, and none of the next."""
    marked = "{% for m in messages %}and {% generation %}{{ m['content'] }}{% endgeneration %} is{% endfor %}"
    data = lines("torn", [{"messages": conversation(2, "a", "yes \U0001F600\U0001D11E")}])
    for name in FOLDERS:
        learnt = run(name, data, *CHAT, "--tokenizer_chat_template", marked).learnt(0)[1]
        assert learnt in ("yes \U0001F600\U0001D11E", " yes \U0001F600\U0001D11E"), (name, learnt)


def test_sampled_prompts():
    """A prompt that is sampled for has the tokens that the same prompt has in training."""
    asked = [{"q": text, "a": other} for text, other in zip(texts(6, 200), texts(7, 200))]
    data = lines("asked", asked)
    for name in FOLDERS:
        taught, sampled = (run(name, data, "--input_key", "q", *more) for more in (["--output_key", "a"], ["--kind", "prompts"]))
        tokenizer = Tokenizer.from_file(f"{folder(name)}/tokenizer.json")
        for i, record in enumerate(asked):
            prompt = f"User: {record['q']}\nAssistant: "
            first = taught.mask[i].index(1)
            assert taught.ids[i][:first] == sampled.ids[i] == tokenizer.encode(prompt).ids, (name, i)
            assert all(taught.mask[i][first:]) and taught.ids[i][-1] == taught.eos and taught.eos not in taught.ids[i][first:-1]
            text = taught.text(taught.ids[i][1 if name != "chatml" else 0:-1])
            space = " " if name in ("llama2", "unigram") else ""
            want = space + prompt + record["a"]
            assert text == (want.replace("\u2581", " ") if space else want), (name, text, want)
        if name in ("chatml", "llama3"):
            chats = lines("chats", [{"messages": conversation(2, r["q"].strip() or "q", r["a"].strip() or "a")} for r in asked])
            taught, sampled = run(name, chats, *CHAT), run(name, lines("users", [
                {"messages": conversation(1, r["q"].strip() or "q")} for r in asked]), *CHAT, kind="prompts")
            for i in range(len(asked)):
                assert taught.ids[i][:taught.mask[i].index(1)] == sampled.ids[i], (name, i)


def test_prompts():
    records = [{"q": "2 + 3?", "a": "5"}, {"q": "e\u0301", "a": 7.5}]
    read = run("chatml", lines("prompts", records), "--input_key", "q", "--label_key", "a", "--input_template", "<{}>",
               kind="prompts")
    assert read.texts(token_file.PROMPT_OFFSETS, token_file.PROMPTS) == [b"<2 + 3?>", "<e\u0301>".encode()]
    assert read.texts(token_file.ANSWER_OFFSETS, token_file.ANSWERS) == [b"5", b"7.5"]
    assert not any(map(any, read.mask)) and read.kind == 4


def test_pairs():
    records = [{"p": "q", "chosen": "good", "rejected": "bad", "margin": 0.5}, {"p": "q", "chosen": "same", "rejected": "same"}]
    read = run("chatml", lines("pairs", records), "--prompt_key", "p", kind="pairs")
    margins = read.numbers(token_file.MARGINS, "d")
    assert margins[0] == 0.5 and math.isnan(margins[1])
    assert [read.learnt(i) for i in range(4)] == [[f"{w}<|im_end|>"] for w in ("good", "bad", "same", "same")]
    assert read.about["counts"]["identical"] == 1 and read.about["counts"]["two_prompts"] == 0
    # in a conversation a response ends with its stop token, as what is sampled does
    for model in ("chatml", "chatml_plain"):
        read = run(model, lines("pairs", records), "--prompt_key", "p", "--apply_chat_template", kind="pairs")
        assert [read.learnt(i) for i in range(2)] == [["good<|im_end|>"], ["bad<|im_end|>"]] and read.ids[0][-1] == read.eos
        both = [{"chosen": conversation(4, "a", "b", "c", "good"), "rejected": conversation(4, "a", "b", "c", "bad")}]
        read = run(model, lines("pairs", both), "--apply_chat_template", kind="pairs")
        assert [read.learnt(i) for i in range(2)] == [["good<|im_end|>"], ["bad<|im_end|>"]]
    # without a key of the prompt it is what both begin with
    read = run("chatml", lines("pairs", [{"chosen": "We say yes", "rejected": "We say no"}]), kind="pairs")
    assert [read.learnt(i) for i in range(2)] == [[" yes<|im_end|>"], [" no<|im_end|>"]]


CALLS = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
         "{% for c in m['tool_calls'] or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}"
         "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# as DeepSeek's: only null says that a function is called
CALLS_OF_NULL = CALLS.replace("{% if m['content'] %}", "{% if m['content'] is not none %}").replace(
    "{% for c in m['tool_calls'] or [] %}", "{% for c in (m['tool_calls'] if m['content'] is none else []) %}")
# writes the calls, and null as the word None
CALLS_AND_NONE = CALLS.replace("{% if m['content'] %}{{ m['content'] }}{% endif %}", "{{ m['content'] }}")


def test_contents():
    """Parts of text are joined, a tool call is what the template makes of it, and nothing else passes for text."""
    def turn(**message):
        return lines("contents", [{"messages": [{"role": "user", "content": "a"}, dict({"role": "assistant"}, **message)]}])
    call = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for model in ("chatml", "chatml_plain"):
        assert run(model, turn(content=parts), *CHAT).learnt(0) == ["one two<|im_end|>"], model
        asked = lines("asked", [{"messages": [{"role": "user", "content": parts}]}])
        assert b"user\none two<|im_end|>" in run(model, asked, *CHAT, kind="prompts").texts(token_file.PROMPT_OFFSETS, token_file.PROMPTS)[0]
        refused('"messages"[1] has the content null, but text is needed', model, turn(content=None), *CHAT)
        refused('"messages"[1] has the content null, but text is needed', model, turn(), *CHAT)
        refused('"messages"[1] has the content 5, but text is needed', model, turn(content=5), *CHAT)
        refused("only parts of type text can be read", model, turn(content=[{"type": "image", "image": "a.png"}]), *CHAT)
        refused("only parts of type text can be read", model, turn(content=["text"]), *CHAT)
        refused("the chat template does not write the tool call 'add'", model, turn(content="b", tool_calls=call), *CHAT)
        refused("the chat template does not write the tool call 'add'", model, turn(content=None, function_call=call[0]["function"]),
                *CHAT)
        refused("a tool call is [5], but it is an object", model, turn(content=None, tool_calls=[5]), *CHAT)
    for text in (CALLS, CALLS_OF_NULL, CALLS_AND_NONE):
        keys = [*CHAT, "--tokenizer_chat_template", text]
        for kind, more in (("sft", []), ("sft", ["--train_on", "all"]), ("labelled", ["--label_key", "l"])):
            data = turn(content=None, tool_calls=call)
            if kind == "labelled":
                data = lines("contents", [dict(json.loads(open(data).read()), l=1)])
            read = run("chatml", data, *keys, *more, kind=kind)
            assert '<call>add {"x": 1}</call><|im_end|>' in read.learnt(0)[0] and "None" not in read.learnt(0)[0], (text, read.learnt(0))
    named = turn(content=None, tool_calls=call)
    tools = lines("tools", [dict(json.loads(open(named).read()), tools=[{"name": "add"}])])
    listed = "{% for t in tools %}{{ t['name'] + '\n' }}{% endfor %}" + CHATML.replace("BEGIN", "").replace("END", "")
    refused("the chat template does not write the tool call 'add'", "chatml", tools, *CHAT, "--tokenizer_chat_template", listed)
    refused('"tools" is "add", but a list of functions is needed', "chatml",
            lines("tools", [{"messages": conversation(2), "tools": "add"}]), *CHAT, "--tokenizer_chat_template", listed)
    as_text, as_list = ([{"messages": conversation(2), "tools": tools}] for tools in ('[{"name": "add"}]', [{"name": "add"}]))
    assert run("chatml", lines("tools", as_text), *CHAT, "--tokenizer_chat_template", listed).ids == \
        run("chatml", lines("tools", as_list), *CHAT, "--tokenizer_chat_template", listed).ids


def test_whole_pairs():
    """Beside a key of the prompt, chosen and rejected may be whole conversations: the prompt stands once."""
    once = [{"chosen": conversation(2, "q", "good"), "rejected": conversation(2, "q", "bad")}]
    keys = ["--prompt_key", "p", "--apply_chat_template"]
    system = [{"role": "system", "content": "s"}]
    for model in ("chatml", "chatml_plain"):
        want = run(model, lines("pairs", once), "--apply_chat_template", kind="pairs", out="want")
        for prompt, before in (("q", []), (" q\n", []), (conversation(1, "q"), []), ("q", system), (system + conversation(1, "q"), system)):
            sides = {key: before + once[0][key] for key in ("chosen", "rejected")}
            read = run(model, lines("pairs", [dict(sides, p=prompt)]), *keys, kind="pairs")
            if before:
                want = run(model, lines("pairs", [sides]), "--apply_chat_template", kind="pairs", out="want")
            assert read.ids == want.ids and read.mask == want.mask, (model, prompt, before, read.text(read.ids[0]))
        # a system's message of the prompt alone; what goes on from a longer prompt
        read = run(model, lines("pairs", [dict(once[0], p=system + conversation(1, "q"))]), *keys, kind="pairs")
        assert read.text(read.ids[0]).count("user") == 1 == read.text(read.ids[0]).count("system")
        longer = conversation(4, "a", "b", "q")
        read = run(model, lines("pairs", [{"p": longer[:3], **once[0]}]), *keys, kind="pairs")
        assert read.text(read.ids[0]).count("user") == 2 and read.learnt(0) == ["good<|im_end|>"]
        # one message of ShareGPT, as LLaMA-Factory has it
        shared = {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
                  "rejected": {"from": "gpt", "value": "bad"}}
        want = run(model, lines("pairs", once), "--apply_chat_template", kind="pairs", out="want")
        assert run(model, lines("pairs", [shared]), "--prompt_key", "conversations", *keys[2:], kind="pairs").ids == want.ids
    refused("begins with a message of the user, \"q\", which is not the prompt's \"other\"", "chatml",
            lines("pairs", [dict(once[0], p="other")]), *keys, kind="pairs")
    whole = [{"input": "q", "output": conversation(2, "q", "good"), "label": 1}]
    want = run("chatml", lines("chats", [{"input": once[0]["chosen"]}]), "--apply_chat_template", out="want")
    assert run("chatml", lines("whole", whole), "--output_key", "output", "--apply_chat_template").ids == want.ids
    assert run("chatml", lines("whole", whole), "--apply_chat_template", kind="labelled").learnt(0) == ["good<|im_end|>"]
    texts = [{"p": "Say it.", "chosen": "Say it. Now", "rejected": "Say it. Later"}]
    for more in ([], ["--apply_chat_template"]):
        assert "both responses begin with the prompt" in run("chatml", lines("pairs", texts), "--prompt_key", "p", *more,
                                                             kind="pairs").said
    assert not run("chatml", lines("pairs", [dict(texts[0], p="Say.")]), "--prompt_key", "p", kind="pairs").said


# what both texts of a pair begin with, and the two responses
PROMPTS = [("Human: q\n\nAssistant:", " We say yes", " We say no"), ("\n\nHuman: q\n\nAssistant:", " The cat", " The car"),
           ("\n\nHuman: q\n\nAssistant: a\n\nHuman: b\n\nAssistant:", " yes", " yes, it is"),
           ("\n\nHuman: q\n\nAssistant: a\n\n", "Human: so\n\nAssistant: b", "Human: and\n\nAssistant: c, longer"),
           ("\n\nHuman: q\n\nAssistant:", " hello", " hello\n\nHuman: x\n\nAssistant: y"),
           ("We say", " yes", " no"), ("the", " cat", " car"), ("a", " b", " bc"), ("", "good", "good!"), ("so:\n", "don't", "don"),
           ("x", " \u4f60\u597d", " \u4f60\u4eec"), ("an Assistant: said", " this", " that"), ("", "cat", "car")]


def test_common_prompts():
    """Without a key of the prompt it ends with the last "Assistant:" of both, or before the first turn or word that differs."""
    for prompt, chosen, rejected in PROMPTS:
        for one, other in ((chosen, rejected), (rejected, chosen)):
            assert common_prompt(prompt + one, prompt + other) == len(prompt), (prompt, one, other)
        read = run("chatml", lines("pairs", [{"chosen": prompt + chosen, "rejected": prompt + rejected}]), kind="pairs")
        whole = [f"{w}<|im_end|>" for w in (chosen, rejected)]  # nothing predicts a first token
        assert [read.learnt(i)[0] for i in range(2)] == whole if prompt else read.learnt(0)[0] in whole[0], (prompt, chosen)
        assert read.about["counts"]["two_prompts"] == 0
    silent = [{"chosen": "\n\nHuman: q\n\nAssistant:", "rejected": "\n\nHuman: q\n\nAssistant: a"},
              {"chosen": "yes", "rejected": "no"}]
    assert run("chatml", lines("pairs", silent), kind="pairs").about["counts"]["zero_length"] == 1


def test_shapes():
    """Records as others write them: the same tokens as the plain ones."""
    def same(data, keys, plain, plain_keys, model="chatml", kind="sft"):
        read, want = run(model, data, *keys, kind=kind), run(model, lines("plain", plain), *plain_keys, kind=kind, out="want")
        assert read.ids == want.ids and read.mask == want.mask, (read.text(read.ids[0]), want.text(want.ids[0]))
    chat = [{"role": "system", "content": "s"}, *conversation(2, "q", "a")]
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    shape = ["--input_key", "conversations", "--apply_chat_template"]
    for model in ("chatml", "chatml_plain"):
        same(lines("shared", [{"conversations": shared}]), shape, [{"messages": chat[1:]}], CHAT, model)
        same(lines("shared", [{"conversations": shared, "system": "s"}]), shape, [{"messages": chat}], CHAT, model)
        same(lines("shared", [{"conversations": [{"from": "system", "value": "s"}, *shared]}]), shape, [{"messages": chat}], CHAT, model)
        same(lines("shared", [{"conversations": [shared[0], chat[2]], "system": "s"}]), shape, [{"messages": chat}], CHAT, model)
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'}
    seen = run("chatml", lines("shared", [{"conversations": [shared[0], call, {"from": "observation", "value": "1"}, shared[1]]}]),
               *shape, "--tokenizer_chat_template", CALLS)
    assert seen.learnt(0) == ['<call>add {"x": 1}</call><|im_end|>', "a<|im_end|>"], seen.learnt(0)
    refused("is from function_call, but its value is not JSON", "chatml",
            lines("bad", [{"conversations": [shared[0], {"from": "function_call", "value": "add"}]}]), *shape)
    refused('"conversations"[0] is from "narrator"', "chatml", lines("bad", [{"conversations": [{"from": "narrator", "value": "a"}]}]),
            *shape)
    two = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    plain, keys = [{"q": "Add.\n1 and 2", "a": "3"}], ["--input_key", "q", "--output_key", "a"]
    same(lines("alpaca", [two]), [], plain, keys)
    same(lines("alpaca", [two]), ["--output_key", "output"], plain, keys)
    same(lines("alpaca", [two]), ["--apply_chat_template"], plain, [*keys, "--apply_chat_template"])
    same(lines("alpaca", [dict(two, input="")]), [], [{"q": "Add.", "a": "3"}], keys)
    same(lines("alpaca", [two]), ["--input_key", "input"], [{"q": "1 and 2"}], ["--input_key", "q"])
    same(lines("alpaca", [two]), ["--label_key", "output"], plain, ["--input_key", "q", "--label_key", "a"], kind="prompts")
    past = dict(two, system="s", history=[["b", "c"]])
    assert run("chatml", lines("alpaca", [past]), "--apply_chat_template").learnt(0) == ["c<|im_end|>", "3<|im_end|>"]
    refused('"system" and "history" need a chat template', "chatml", lines("bad", [past]))
    refused('"history" is [1], but a list of [prompt, response]', "chatml", lines("bad", [dict(two, history=[1])]))
    pair = {"instruction": "Add.", "input": "1 and 2", "chosen": "3", "rejected": "4"}
    same(lines("alpaca", [pair]), [], [{"p": "Add.\n1 and 2", "chosen": "3", "rejected": "4"}], ["--prompt_key", "p"], kind="pairs")
    deep = [{"data": {"turn": {"q": "a", "chosen": "b"}}, "x.y": "c"}]
    same(lines("deep", deep), ["--input_key", "data.turn.q", "--output_key", "x.y"], [{"q": "a", "a": "c"}], keys)
    refused('no key "data.turn.z"; set --input_key to one of those present: \'data\'', "chatml", lines("bad", deep), "--input_key",
            "data.turn.z")


def test_summary():
    """What is said of a run: pairs are called so, and what pairs alone may be is said of them alone."""
    counts = collections.Counter(read=29, kept=23, supervised=101, dropped_long=3, zero_length=2, cut=5, fully_masked=7, identical=4,
                                 two_prompts=6)
    for kind in ("sft", "pairs", "labelled", "prompts"):
        what, more = ("pairs", ", 4 identical, 6 with two prompts") if kind == "pairs" else ("records", "")
        wanted = f"29 {what} read, 23 kept with 211 tokens, 101 of them supervised; 3 too long, 2 empty, 5 cut, 7 fully masked{more}"
        assert prepare.summary(counts, 211, kind) == wanted, prepare.summary(counts, 211, kind)


def test_sets_by_their_keys():
    """Sets that OpenRLHF 0.2 knew by their keys: prompts and answers as it made them, and ties left out."""
    def whole(records, kind="sft", *more):
        read = run("chatml", lines("known", records), *more, kind=kind)
        texts = [(read.text(ids), "".join(read.learnt(i))) for i, ids in enumerate(read.ids)]
        return [(text[:len(text) - len(answer)], answer.replace("<|im_end|>", "")) for text, answer in texts], read
    orca = {"id": "x", "system_prompt": "S", "question": "q", "response": "a"}
    talk = "\n\nHuman: q\n\nAssistant:"
    full = {"prompt": talk, "response": " a", "chosen": " a", "rejected": " b"}
    oasst = {"prompt": "prompter:qassistant:wprompter:z", "chosen": "a", "rejected": "b"}
    said = "\nHuman: q\nAssistant: w\nHuman: z\nAssistant: "
    chats = [conversation(4, "q", "w", "z", answer) for answer in "ab"]
    arena = {"winner": "model_b", "conversation_a": chats[1], "conversation_b": chats[0]}
    gpt = {"question": {"full_text": "q"}, "answer_0": "b", "answer_1": "a", "score_0": -0.25, "score_1": 0.25}
    found, read = whole([orca, dict(orca, system_prompt="")])
    assert found == [("Human: S\nq\nAssistant: ", "a"), ("Human: \nq\nAssistant: ", "a")]
    assert "2 records were read as Open-Orca/OpenOrca" in read.said
    assert whole([orca], "sft", "--input_template", "[{}]")[0] == [("[S\nq]", "a")]
    assert whole([full, oasst, arena, gpt], "pairs")[0] == [
        (talk, " a"), (talk, " b"), (said, "a"), (said, "b"),
        *[("Human: q\nAssistant: \nw\nHuman: z\nAssistant:", answer) for answer in (" \na", " \nb")],
        ("Human: q\nAssistant: ", "a"), ("Human: q\nAssistant: ", "b")]
    prompts = [prompt + answer for prompt, answer in whole([full, oasst, orca, arena, gpt], "prompts")[0]]
    assert prompts == [talk, said, "Human: S\nq\nAssistant: ", "Human: q\nAssistant: \nw\nHuman: z\nAssistant: ", "Human: q\nAssistant: "]
    found, read = whole([dict(arena, winner="tie"), gpt, dict(gpt, score_0=0.25), dict(arena, winner="tie (bothbad)")], "pairs")
    assert len(found) == 2 and read.about["counts"]["ties"] == 3 and "3 pairs are ties" in read.said
    assert whole([dict(arena, winner="tie")] * 300 + [gpt], "pairs")[0] == found  # a batch of ties alone
    named = whole([full], "pairs", "--prompt_key", "response", "--input_template", "{}")[0]
    assert named == [(" a", " a"), (" a", " b")]  # a key that is named is taken
    refused('there is a "prompt", but the answers do not begin with it; give --prompt_key prompt', "chatml",
            lines("bad", [dict(full, prompt="q")]), kind="pairs")
    refused('"score_0" and "score_1" are ["x", 1]', "chatml", lines("bad", [dict(gpt, score_0="x", score_1=1)]), kind="pairs")
    refused('"conversation_b" is "x", but a list of messages', "chatml", lines("bad", [dict(arena, conversation_b="x")]), kind="pairs")
    refused('no key "input"', "chatml", lines("bad", [orca]), "--output_key", "response")
    refused('no key "input"', "chatml", lines("bad", [full]))


def test_files():
    """A list of records whatever it is called, gzip, and what is broken in them."""
    records = [{"input": f"text {i}"} for i in range(3)]
    want = run("chatml", lines("plain", records), out="want").ids
    for name, content in (("list.jsonl", json.dumps(records)), ("wide.jsonl", json.dumps(records, indent=1)),
                          ("zip.jsonl.gz", "\n".join(map(json.dumps, records))), ("zip.json.gz", json.dumps(records))):
        with (gzip.open if name.endswith(".gz") else open)(f"{OUT}/{name}", "wt") as file:
            file.write(content)
        assert run("chatml", f"{OUT}/{name}").ids == want, name
    with open(f"{OUT}/zip.jsonl.gz", "rb") as file:
        whole = file.read()
    for broken in (whole[:-9], b"no gzip at all", whole[:12] + b"\0\0" + whole[14:]):
        with open(f"{OUT}/broken.jsonl.gz", "wb") as file:
            file.write(broken)
        refused("broken.jsonl.gz is not a complete gzip file", "chatml", f"{OUT}/broken.jsonl.gz")
    for text, said in (('[{"input": "a", "input": "b"}]', 'bad.jsonl: key "input" occurs twice'),
                       ('[{"input": "a"}] {', "bad.jsonl: broken JSON"), ('[{"input": "a"}, 5]', ":2: the record is 5"),
                       ('{"input": ' + "[" * 100000, "lie too deep in each other")):
        refused(said, "chatml", lines("bad", [text]))
    with open(f"{OUT}/bad.jsonl", "wb") as file:
        file.write(b'{"input": "a\xff"}\n')
    refused(":1: byte 12 is not UTF-8", "chatml", f"{OUT}/bad.jsonl")


def test_places():
    """Only a token file is replaced."""
    good = lines("good", [{"input": "a"}])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = f"{folder('chatml')}/{name}"
        before = content(path)
        try:
            prepare.prepare(["--pretrain", folder("chatml"), "--dataset", good, "--output", path, "--overwrite"])
        except Refused as why:
            assert "exists and is not a token file, so --overwrite does not replace it" in str(why), why
        assert content(path) == before, f"{name} was replaced"


def damaged(name, change):
    """A folder whose files are otherwise: change(tokenizer, config, generation)."""
    files = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    parts = [json.loads(content(f"{folder('chatml')}/{file}")) for file in files]
    change(*parts)
    os.makedirs(folder(name), exist_ok=True)
    for file, part in zip(files, parts):
        with open(f"{folder(name)}/{file}", "w") as to:
            to.write(part if isinstance(part, str) else json.dumps(part))
    return name


def test_damaged_folders():
    """What a folder or a template may hold is a sentence, not a traceback."""
    good = lines("good", [{"messages": conversation(2)}])

    def beyond(tokenizer, *_):
        tokenizer["added_tokens"][-1]["id"] = 5000

    def huge(tokenizer, *_):
        tokenizer["model"]["vocab"]["x" * 40] = 2000000000

    def stops(_, __, generation):
        generation["eos_token_id"] = [2, 70000, -5, 1 << 70, "a"]
    refused("tokenizer.json", damaged("odd", beyond), good, *CHAT)
    refused("has a token with the id 2000000000", damaged("odd", huge), good, *CHAT)
    read = run(damaged("odd", stops), good, *CHAT)
    assert read.stops == [2] and "has [70000, -5, 1180591620717411303424, 'a'] among its eos_token_id" in read.said, read.said
    with open(f"{folder('odd')}/tokenizer_config.json", "w") as file:
        file.write("[" * 100000)
    refused("tokenizer_config.json cannot be read", "odd", good, *CHAT)
    for text, said in (("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ messages[0].content * 2 ** 70 }}", "does not take these 2 messages"),
                       ("{{ (2.0 ** 1024) }}", "OverflowError"), ("{{ 'a' % 5 }}", "TypeError")):
        refused(said, "chatml", good, *CHAT, "--tokenizer_chat_template", text)
    whole, chat_template.LONGEST = chat_template.LONGEST, 0.2
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    try:
        refused("takes more than 0.2 seconds for one text", "chatml", good, *CHAT, "--tokenizer_chat_template", endless)
    finally:
        chat_template.LONGEST = whole
    code = subprocess.run([sys.executable, f"{ROOT}/demos/prepare.py", "--pretrain", folder("chatml"), "--dataset", good, "--output",
                           f"{OUT}/refused.tokens", *CHAT, "--workers", "1", "--tokenizer_chat_template",
                           "{{ raise_exception('\x1b[31m red') }}"], capture_output=True, text=True)
    assert code.returncode == 2 and "\\x1b[31m red" in code.stderr and "\x1b" not in code.stderr, code.stderr


def test_environment():
    """The environment of chat templates, as transformers has it."""
    begin, end = chat_template.MARK_BEGIN, chat_template.MARK_END
    environment = chat_template.template_environment(datetime.datetime(2024, 5, 6))
    for text, want in (
            ("{{ {'b': '\u00e9<', 'a': 1} | tojson }}", '{"b": "\u00e9<", "a": 1}'), ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
            ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"), ("{{ '\u00e9' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
            ("{% if true %}\na{% endif %}", "a"), ("x\n  {% if true %}a{% endif %}", "x\na"), ("{{ strftime_now('%Y-%m-%d') }}", "2024-05-06"),
            ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1"), ("a{% generation %}b{% endgeneration %}c", f"a{begin}b{end}c")):
        assert environment.from_string(text).render() == want, (text, environment.from_string(text).render())
    for text, marked in (("{% generation %}{% endgeneration %}", True), ("{%- generation -%}{%- endgeneration -%}", True), ("generation", False)):
        made = chat_template.Template(text, model_folder.Folder(folder("chatml")), datetime.datetime.now())
        assert (made.marked, made.stops) == (marked, ("<|im_end|>", "<|endoftext|>")), text


def test_ends_by_ids():
    """EOS by its id in config.json, or in generation_config.json, where tokenizer_config.json names none."""
    def nameless(_, config, generation):
        config.pop("eos_token")
        generation.clear()
    data = lines("one", [{"input": "a"}])
    refused("names no eos_token that its tokenizer has (it says None)", damaged("odd", nameless), data)
    for name, said, eos in (("generation_config", {"eos_token_id": [1, 2]}, 1), ("config", {"eos_token_id": 2}, 2)):
        with open(f"{folder('odd')}/{name}.json", "w") as file:
            json.dump(said, file)
        read = run("odd", data)
        assert (read.eos, read.ids[0][-1]) == (eos, eos), (name, read.eos)
    os.remove(f"{folder('odd')}/config.json")


def test_memory():
    """A template that doubles a text ends in a sentence, at half of the machine's memory or the limit that there is."""
    doubling = ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}")
    data = lines("good", [{"messages": conversation(2)}])
    words = [sys.executable, f"{ROOT}/demos/prepare.py", "--pretrain", folder("chatml"), "--dataset", data, "--output",
             f"{OUT}/refused.tokens", *CHAT, "--workers", "2", "--tokenizer_chat_template", doubling]
    code = subprocess.run(["bash", "-c", 'ulimit -d 1500000; exec "$@"', "bash", *words], capture_output=True, text=True)
    assert code.returncode == 2 and "does not take these 2 messages: MemoryError" in code.stderr, code.stderr[-300:]


def test_workers_end():
    """No process outlives the first, even where that is killed."""
    data = lines("endless", [{"messages": conversation(2)}] * 2000)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    first = subprocess.Popen([sys.executable, f"{ROOT}/demos/prepare.py", "--pretrain", folder("chatml"), "--dataset", data, "--output",
                              f"{OUT}/killed.tokens", *CHAT, "--workers", "2", "--tokenizer_chat_template", endless])
    children, until = [], time.monotonic() + 20
    while len(children) < 2 and time.monotonic() < until:
        time.sleep(0.05)
        with open(f"/proc/{first.pid}/task/{first.pid}/children") as file:
            children = [int(child) for child in file.read().split()]
    first.kill()
    first.wait()
    while any(map(alive, children)) and time.monotonic() < until + 60:
        time.sleep(0.05)
    assert len(children) >= 2 and not any(map(alive, children)), children


def test_start_method():
    """Processes work also where Python starts them by a server, as newer versions do."""
    data = lines("served", [{"messages": conversation(2)}] * 700)
    main = ("import multiprocessing, runpy, sys\nif __name__ == '__main__':\n    multiprocessing.set_start_method('forkserver')\n"
            "    runpy.run_path(sys.argv.pop(1), run_name='__main__')\n")
    with open(f"{OUT}/served.py", "w") as file:
        file.write(main)
    words = ["--pretrain", folder("chatml"), "--dataset", data, *CHAT]
    done = subprocess.run([sys.executable, f"{OUT}/served.py", f"{ROOT}/demos/prepare.py", *words, "--workers", "2", "--output",
                           f"{OUT}/served.tokens"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-300:]
    assert Read(f"{OUT}/served.tokens").ids == run("chatml", data, *CHAT).ids


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_labelled():
    records = [{"input": "q", "output": "a", "label": label} for label in (True, 0, "1", False)]
    for more in ([], ["--apply_chat_template"]):
        read = run("chatml", lines("labelled", records), *more, kind="labelled")
        assert list(read.sections[token_file.LABELS]) == [1, 0, 1, 0] and read.learnt(0) == ["a<|im_end|>"]
        assert read.ids[0][-1] == read.eos
    refused(':1: "label" is 2, but it must be true or false', "chatml", lines("bad", [{"input": "q", "output": "a", "label": 2}]),
            kind="labelled")


def test_lengths():
    long = {"input": "a " * 50, "output": "b " * 50}
    short = {"input": "a", "output": "b"}
    data, keys = lines("long", [short, long, short]), ["--output_key", "output", "--max_len", "70", "--input_template", "{}"]
    read = run("chatml", data, *keys, "--truncation", "drop")
    assert len(read.ids) == 2 and read.about["counts"]["dropped_long"] == 1 and read.about["counts"]["read"] == 3
    read = run("chatml", data, *keys)
    assert [len(ids) for ids in read.ids][1] == 70 and read.ids[1][-1] == read.eos and read.about["counts"]["cut"] == 1
    whole = run("chatml", data, *keys[:2], "--input_template", "{}", "--max_len", "0")
    prompt, response = list(whole.mask[1]).index(1), sum(whole.mask[1])
    both = run("chatml", data, *keys, "--truncation", "cut_both")
    share = int(70 * (response / (prompt + response)))
    assert len(both.ids[1]) == 70 and sum(both.mask[1]) == share and read.eos not in both.ids[1]
    assert list(both.ids[1]) == list(whole.ids[1])[:70 - share] + list(whole.ids[1])[prompt:prompt + share]
    read = run("chatml", lines("chats", [{"messages": conversation(2, "a", "b " * 90)}]), *CHAT, "--max_len", "70")
    assert len(read.ids[0]) == 70 and read.ids[0][-1] == read.eos and read.mask[0][-1] == 1  # an end where it is cut
    refused("1 too long", "chatml", lines("chats", [{"messages": conversation(2, "a " * 90, "b")}]), *CHAT, "--max_len", "70")
    assert len(run("chatml", data, *keys[:2], "--max_samples", "1").ids) == 1
    assert run("chatml", lines("empty", [short, {"input": "a", "output": ""}]), *keys).about["counts"]["zero_length"] == 1


def test_sets():
    """Several sets, folders and kinds of files."""
    def named(name, count):
        return lines(name, [{"input": f"{name} {i}"} for i in range(count)])
    a, b = named("a", 40), named("b", 300)
    first = [Read(f"{OUT}/out.tokens").text(ids) for ids in run("chatml", f"{a},{b}").ids]
    assert first == [f"a {i}<|im_end|>" for i in range(40)] + [f"b {i}<|im_end|>" for i in range(300)]
    shares = [Read(f"{OUT}/out.tokens").text(ids)[0] for ids in run("chatml", f"{a},{b}", "--max_samples", "85").ids]
    assert (shares.count("a"), shares.count("b")) == (10, 75)  # the limit counts after mixing
    mixed = run("chatml", f"{a},{b}", "--dataset_probs", "0.25,0.75")
    told = [mixed.text(ids).replace("<|im_end|>", "") for ids in mixed.ids]
    assert [t for t in told if t[0] == "a"] == [f"a {i}" for i in range(40)]  # in order, until it is exhausted
    assert [t for t in told if t[0] == "b"] == [f"b {i}" for i in range(len(told) - 40)] and 80 < len(told) < 240
    assert run("chatml", f"{a},{b}", "--dataset_probs", "0.25,0.75").raw == mixed.raw
    assert run("chatml", f"{a},{b}", "--dataset_probs", "0.25,0.75", "--seed", "1").raw != mixed.raw
    refused("--dataset_probs has 1 weights for 2 data sets", "chatml", f"{a},{b}", "--dataset_probs", "1")
    os.makedirs(f"{OUT}/set/test", exist_ok=True)
    os.replace(a, f"{OUT}/set/train.jsonl")
    os.replace(b, f"{OUT}/set/test/part.jsonl")
    assert len(run("chatml", f"json@{OUT}/set").ids) == 40
    assert len(run("chatml", f"json@{OUT}/set", "--split", "test").ids) == 300
    with open(f"{OUT}/list.json", "w") as file:
        json.dump([{"input": "x"}, {"input": "y"}], file, indent=1)
    assert len(run("chatml", f"{OUT}/list.json").ids) == 2
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        os.replace(named("none", 1), f"{OUT}/none.parquet")
        refused("pip install pyarrow", "chatml", f"{OUT}/none.parquet")
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": conversation(2)}]), f"{OUT}/set.parquet")
    assert run("chatml", f"{OUT}/set.parquet", *CHAT).learnt(0) == ["turn 1<|im_end|>"]


def test_stream():
    """Plain text is the tokens of the whole, however it is dealt out."""
    text = "\n".join(texts(8, 900)) + "\nlast"
    path = f"{OUT}/plain.txt"
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    whole, data_sets.STREAM = data_sets.STREAM, 500
    try:
        for name in FOLDERS:
            want = Tokenizer.from_file(f"{folder(name)}/tokenizer.json").encode(text, add_special_tokens=False).ids
            for workers in (1, 3):
                read = run(name, path, "--pretrain_mode", "--max_len", "64", workers=workers)
                assert sum(read.ids, []) == want, (name, workers)
                spaces = " " if name in ("llama2", "unigram") else "\u2581"
                assert read.text(want).lstrip() == text.replace("\u2581", spaces).lstrip()
                assert {len(ids) for ids in read.ids[:-1]} == {64} and all(m == [0] + [1] * (len(m) - 1) for m in read.mask)
    finally:
        data_sets.STREAM = whole
    refused("it needs --pretrain_mode", "chatml", path)


def test_workers():
    data, whole = lines("many", conversations(9, 1500)), processes.BATCH
    processes.BATCH = 32
    try:
        one, four = run("chatml_plain", data, *CHAT), run("chatml_plain", data, *CHAT, workers=4, out="four")
    finally:
        processes.BATCH = whole
    assert one.raw == four.raw and len(one.ids) == 1500
    broken = lines("many", conversations(9, 1200) + ["{"])
    code = subprocess.run([sys.executable, f"{ROOT}/demos/prepare.py", "--pretrain", folder("chatml"), "--dataset", broken,
                           "--output", f"{OUT}/refused.tokens", *CHAT, "--workers", "3"], capture_output=True, text=True)
    assert code.returncode == 2 and "many.jsonl:1201: broken JSON" in code.stderr and code.stderr.count("\n") == 1, code.stderr
    assert not os.path.exists(f"{OUT}/refused.tokens")


def test_refused():
    def chat(*messages):
        return lines("bad", [{"messages": list(messages)}])
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    good = chat(user, assistant)
    refused("none of the 1 messages is the assistant's", "chatml", chat(user), *CHAT)
    refused(":1: the chat template does not take these 2 messages: no system here", "llama2",
            chat({"role": "system", "content": "s"}, assistant), *CHAT)
    rewrites = "{% for m in messages %}{{ '<|im_start|>' + (m['content'] if loop.last else 'old') + '<|im_end|>' }}{% endfor %}"
    refused("up to message 2 differently alone than as part of the whole", "chatml", chat(user, assistant, user, assistant), *CHAT,
            "--tokenizer_chat_template", rewrites)
    silent = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>' }}{% endfor %}"
    refused("leaves out or changes what the assistant says in message 2", "chatml", good, *CHAT, "--tokenizer_chat_template",
            silent)
    nothing = "{{ messages[0]['content'] }}"
    refused("differently alone than as part", "chatml", good, *CHAT, "--tokenizer_chat_template", nothing)
    empty = "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    refused("{% generation %} marks nothing", "chatml", good, *CHAT, "--tokenizer_chat_template", empty)
    refused("is not valid Jinja", "chatml", good, *CHAT, "--tokenizer_chat_template", "{% for %}")
    refused("neither a file nor a template", "chatml", good, *CHAT, "--tokenizer_chat_template", "nowhere.jinja")
    refused("is a list, but text is needed; lists of messages need --apply_chat_template", "chatml", good, "--input_key",
            "messages")
    refused("is a message is an object"[5:], "chatml", lines("bad", [{"messages": [{"who": "human"}]}]), *CHAT)
    refused("has the content null", "chatml", lines("bad", [{"messages": [{"from": "human"}]}]), *CHAT)
    refused('bad.jsonl:2: no key "output"; set --output_key', "chatml",
            lines("bad", [{"input": "a", "output": "b"}, {"input": "a"}]), "--output_key", "output")
    refused("is text without a prompt; give --prompt_key", "chatml", lines("bad", [{"chosen": "a", "rejected": "b"}]),
            "--apply_chat_template", kind="pairs")
    refused(":1: key \"input\" occurs twice", "chatml", lines("bad", ['{"input": "a", "input": "b"}']))
    refused(":1: the record is [1]", "chatml", lines("bad", ["[1]"]))
    refused(":2: a text holds half a character", "chatml", lines("bad", [{"input": "a"}, '{"input": "a\\ud800"}']))
    refused("is empty, but a response needs a token", "chatml", lines("bad", [{"p": "a", "chosen": "", "rejected": "b"}]),
            "--prompt_key", "p", kind="pairs")
    refused("nothing is left", "chatml", lines("bad", [{"input": ""}]))
    refused("is not a file", "chatml", f"{OUT}/nowhere.jsonl")
    refused("two ways to shape a text", "chatml", good, *CHAT, "--input_template", "{}")
    refused("leave out --truncation cut", "chatml", good, *CHAT, "--truncation", "cut", kind="prompts")
    refused("--train_on is for --kind sft", "chatml", good, *CHAT, "--train_on", "all", kind="pairs")
    os.makedirs(folder("bare"), exist_ok=True)
    refused("give the folder of a model with its tokenizer", "bare", good)
    open(f"{folder('bare')}/tokenizer.model", "w").close()
    refused("has tokenizer.model, but no tokenizer.json, which is needed; make one: python3 -c", "bare", good)
    byte_level(folder("endless"), ["<|a|>"], {"eos_token": "<|b|>"})
    refused("names no eos_token that its tokenizer has (it says '<|b|>')", "endless", good)
    byte_level(folder("endless"), ["<|a|>"], {"eos_token": "<|a|>"})
    refused("has no chat template", "endless", good, *CHAT)
    with open(f"{folder('endless')}/tokenizer.json") as file:
        content = json.load(file)
    for decoder, said in (({"type": "WordPiece", "prefix": "##", "cleanup": True}, "a decoder WordPiece, which is not supported"),
                          (None, "has no decoder")):
        with open(f"{folder('endless')}/tokenizer.json", "w") as file:
            json.dump(dict(content, decoder=decoder), file)
        refused(said, "endless", lines("good", [{"input": "a"}]))
    with open(f"{OUT}/there.tokens", "w") as file:
        file.write("mine")
    try:
        prepare.prepare(["--pretrain", folder("chatml"), "--dataset", good, "--output", f"{OUT}/there.tokens"])
    except Refused as why:
        assert "exists already; add --overwrite" in str(why)
    with open(f"{OUT}/there.tokens") as file:
        assert file.read() == "mine"


def test_notices():
    never_ends = ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
                  "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    read = run("chatml", lines("chats", [{"messages": conversation(2, "a", " b")}]), *CHAT, "--tokenizer_chat_template", never_ends)
    assert "ends what the assistant says in none of <|im_end|>" in read.said, read.said
    merged = lines("chats", [{"messages": conversation(2, "a", "the")}])
    said = run("chatml", merged, *CHAT, "--tokenizer_chat_template", never_ends).said
    assert "in 1 places a prompt's last characters and the answer's first are one token" in said, said
    assert not run("chatml", lines("chats", [{"messages": conversation(2)}]), *CHAT).said
    byte_level(folder("gpt2"), ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], pattern=None,
               config={"bos_token": "<|bos|>", "eos_token": "<|eot_id|>", "chat_template": template(LLAMA3, False)})
    said = run("gpt2", lines("chats", [{"messages": conversation(2)}]), *CHAT).said
    assert "and 1 of 1 prompts that were looked at have other tokens alone" in said, said


# ---- the trainers ----


def train(trainer, *options, code=0):
    done = subprocess.run([f"build/train_{trainer}", *options], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == code, f"train_{trainer}: exit {done.returncode}: {done.stderr[-300:]}"
    return done.stderr + done.stdout


def model_of(save, tokenizer):
    """What was trained from nothing becomes a model with that tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        with open(f"{folder(tokenizer)}/{name}", "rb") as source, open(f"{save}/{name}", "wb") as copy:
            copy.write(source.read())


def content(path):
    with open(path, "rb") as file:
        return file.read()


SMALL = ["--packing_samples", "--train_batch_size", "4", "--max_steps", "2", "--num_hidden_layers", "1", "--hidden_size", "32"]


def stages(name, questions, preferences, key, answer):
    """SFT on 1 rank and on 4, DPO, reward model, KTO and PPO, each upon a file of its own."""
    def out(what):
        return os.path.abspath(f"{OUT}/{name}_{what}")

    def make(kind, data, *keys, model="chatml"):
        run(model, data, "--apply_chat_template", "--max_samples", "60", *keys, kind=kind, out=f"{name}_{kind}")
        return out(f"{kind}.tokens")
    sft = make("sft", questions, "--input_key", key, "--output_key", answer)
    for ranks in ("1", "4"):
        said = train("sft", "--dataset", sft, *SMALL, "--ring_attn_size", ranks, "--save_path", out(f"model{ranks}"))
        assert "60 read, 60 kept" in said, said
    assert content(out("model1/model.safetensors")) == content(out("model4/model.safetensors")), "other bits on 4 ranks"
    config = json.loads(content(out("model1/config.json")))
    told = [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert told == [None, 2, 0] and config["vocab_size"] == Read(sft).vocab, config
    model = out("model1")
    model_of(model, "chatml")
    base = ["--pretrain", model, *SMALL[:5], "--lr_scheduler", "constant", "--warmup_steps", "0"]
    pairs = make("pairs", preferences, "--prompt_key", key, "--chosen_key", "chosen", "--rejected_key", "rejected")
    for ranks in ("1", "4"):
        train("dpo", "--dataset", pairs, *base, "--ring_attn_size", ranks, "--metrics_path", out("dpo.jsonl"), "--save_path",
              out(f"dpo{ranks}"))
        with open(out("dpo.jsonl")) as metrics:
            losses = [json.loads(line)["loss"] for line in metrics]
        assert losses[0] == math.log(2) and losses[1] != losses[0], losses
    assert content(out("dpo1/model.safetensors")) == content(out("dpo4/model.safetensors"))
    assert content(out("dpo1/tokenizer.json")) == content(f"{folder('chatml')}/tokenizer.json")
    train("rm", "--dataset", pairs, "--eval_dataset", pairs, *base, "--save_path", out("reward"))
    prompts = make("prompts", questions, "--input_key", key, "--label_key", answer)
    for ranks in ("1", "2"):
        said = train("ppo", "--prompt_data", prompts, "--eval_dataset", prompts, *base, "--reward_rule", "last_number",
                     "--reward_pretrain", out("reward"), "--pretrain_data", sft, "--rollout_batch_size", "4", "--generate_max_len",
                     "12", "--logging_steps", "1", "--ring_attn_size", ranks, "--save_path", out(f"ppo{ranks}"))
        assert "rollout 2: reward" in said and "of 60 held-out prompts" in said, said
    assert content(out("ppo1/model.safetensors")) == content(out("ppo2/model.safetensors"))
    return model, sft, pairs, prompts, base


def test_trainers():
    stories = os.path.abspath(f"{OUT}/arith.jsonl")
    subprocess.run(["build/make_arith", stories, "60", "3"], cwd=ROOT, check=True, capture_output=True)
    with open(f"{OUT}/arith.jsonl") as file:
        records = [json.loads(line) for line in file]
    preferences = lines("preferences", [dict(r, chosen=r["answer"], rejected=r["wrong"]) for r in records])
    model, sft, pairs, prompts, base = stages("arith", f"{OUT}/arith.jsonl", preferences, "question", "answer")
    labelled = lines("liked", [{"input": r["question"], "output": r["answer"], "label": i % 2} for i, r in enumerate(records)])
    run("chatml", labelled, "--apply_chat_template", kind="labelled", out="liked")
    train("kto", "--dataset", os.path.abspath(f"{OUT}/liked.tokens"), *base, "--save_path", os.path.abspath(f"{OUT}/kto"))
    # what does not go together
    save = ["--save_path", os.path.abspath(f"{OUT}/none")]
    said = train("sft", "--dataset", pairs, *base, *save, code=2)
    assert "is of kind pairs, for train_dpo and train_rm; make one of --kind sft" in said, said
    assert "is of kind sft, for train_sft" in train("dpo", "--dataset", sft, *base, *save, code=2)
    assert "a document has " in train("sft", "--dataset", sft, *base, *save, "--max_len", "20", code=2)
    # options that the file settles: said again they change nothing, said otherwise they are refused
    train("sft", "--dataset", sft, *base, *save, "--apply_chat_template", "--input_key", "question", "--truncation", "cut", "--dry_run")
    for option, value in (("input_key", "other"), ("tokenizer_chat_template", "{{ x }}"), ("chat_template", "llama3"),
                          ("truncation", "drop"), ("train_on_inputs", "true"), ("dataset_probs", "0.5,0.5")):
        said = train("sft", "--dataset", sft, *base, *save, f"--{option}", value, code=2)
        assert f"--{option} is {value}, but {sft} was made with" in said, said
    assert "was made with another tokenizer" in train("sft", "--dataset", sft, "--pretrain", other_tokenizer(model), *save, code=2)
    said = train("dpo", "--dataset", pairs, *base, "--ref_pretrain", f"{model}_other", *save, code=2)
    assert "has another tokenizer.json than the one that" in said, said
    raw = train("sft", "--dataset", stories, "--input_key", "question", "--output_key", "answer", *base, *save, code=2)
    train("sft", "--dataset", typed(raw), *base, *save)  # what it says to type
    printed_lines(stories, preferences, labelled, base)


def typed(said):
    """Runs the line that a trainer printed; the file that it made."""
    line = said[said.index("python3 demos/prepare.py"):].strip()
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout.decode().split("\0")[1:-1]
    done = subprocess.run([sys.executable, *words, "--overwrite"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (line, done.stderr)
    return words[words.index("--output") + 1]


def printed_lines(stories, preferences, labelled, base):
    """They keep every option that was given, and add none that would change a text."""
    def made(trainer, *options, data="--dataset"):
        said = train(trainer, *options, *base, "--save_path", os.path.abspath(f"{OUT}/none"), code=2)
        assert "python3 demos/prepare.py" in said, said
        return Read(os.path.join(ROOT, typed(said)))

    def same(got, want):
        assert got.ids == want.ids and got.mask == want.mask, (got.text(got.ids[0]), want.text(want.ids[0]))
    keys = ["--input_key", "question", "--output_key", "answer"]
    plain = ["--max_samples", "7", "--input_template", "<{}>\n'a'"]
    same(made("sft", "--dataset", stories, *keys, *plain), run("chatml", stories, *keys, *plain))
    same(made("sft", "--dataset", stories, *keys), run("chatml", stories, *keys))
    cut = ["--max_len", "60", "--truncation", "cut"]
    same(made("sft", "--dataset", stories, *keys, *cut, "--train_on_inputs"), run("chatml", stories, *keys, *cut, "--train_on", "all"))
    same(made("sft", "--dataset", stories, *keys, "--apply_chat_template"), run("chatml", stories, *keys, "--apply_chat_template"))
    told = ["--apply_chat_template", "--tokenizer_chat_template", CALLS]
    same(made("sft", "--dataset", stories, *keys, *told), run("chatml", stories, *keys, *told))
    chats = os.path.abspath(lines("listed", conversations(4, 12)))
    for trainer, kind in (("sft", "sft"), ("kto", "labelled")):
        if kind == "labelled":
            chats = os.path.abspath(lines("listed", [dict(r, label=1) for r in conversations(4, 12)]))
        want = run("chatml", chats, *CHAT, kind=kind)
        same(made(trainer, "--dataset", chats, "--input_key", "messages"), want)
    whole = os.path.abspath(lines("whole", [{"chosen": conversation(2, "q", "a"), "rejected": conversation(2, "q", "b")}]))
    for trainer in ("dpo", "rm"):
        same(made(trainer, "--dataset", whole), run("chatml", whole, "--apply_chat_template", kind="pairs"))
    read = os.path.abspath(lines("hh", [{"chosen": f"\n\nHuman: {i}?\n\nAssistant: the cat", "rejected":
                                         f"\n\nHuman: {i}?\n\nAssistant: the car"} for i in range(5)]))
    same(made("dpo", "--dataset", read), run("chatml", read, kind="pairs"))
    asked = ["--input_key", "question", "--label_key", "answer"]
    reward = ["--reward_rule", "last_number"]
    same(made("ppo", "--prompt_data", stories, *asked, *reward, "--input_template", "({})"),
         run("chatml", stories, *asked, "--input_template", "({})", kind="prompts"))


def other_tokenizer(model):
    other = f"{model}_other"
    os.makedirs(other, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        with open(f"{other}/{name}", "wb") as file:
            file.write(content(f"{model}/{name}"))
    model_of(other, "chatml")
    with open(f"{other}/tokenizer.json", "a") as file:
        file.write("\n")
    return other


def asked_of_a_server(options):
    """Trains by the rewards of a server; the questions that it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = json.dumps({"rewards": [float(i) for i in range(len(asked[-1]["query"]))]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        train("ppo", *options, "--remote_rm_url", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    return asked


def test_servers():
    """A reward server reads the prompt as the model got it, the right answer, and what was sampled without special tokens."""
    out = os.path.abspath(f"{OUT}/served")
    data = lines("served", [{"q": f"{i} + {i}?", "a": f"so {2 * i}"} for i in range(6)])
    prompts = run("chatml", data, "--input_key", "q", "--label_key", "a", "--apply_chat_template", kind="prompts", out="served")
    run("chatml", data, "--input_key", "q", "--output_key", "a", out="served_sft")
    train("sft", "--dataset", f"{out}_sft.tokens", *SMALL, "--save_path", f"{out}_model")
    model_of(f"{out}_model", "chatml")
    asked = asked_of_a_server(["--prompt_data", f"{out}.tokens", "--pretrain", f"{out}_model", *SMALL[:5],
                               "--rollout_batch_size", "3", "--generate_max_len", "8", "--save_path", f"{out}_ppo"])
    texts = {text.decode() for text in prompts.texts(token_file.PROMPT_OFFSETS, token_file.PROMPTS)}
    assert len(asked) == 2 and "<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n" in texts
    for question in asked:
        for query, prompt, label in zip(question["query"], question["prompts"], question["labels"]):
            number = int(prompt.split("\n")[1].split(" ")[0])
            assert prompt in texts and query.startswith(prompt) and label == f"so {2 * number}", (query, prompt, label)
            assert "<|im" not in query[len(prompt):]


def test_going_on():
    """A run goes on from its checkpoint with the same file, and not with another."""
    out = os.path.abspath(f"{OUT}/going")
    for name, seed in (("going", 1), ("other", 2)):
        run("chatml", lines(name, [{"input": text, "output": "b"} for text in texts(seed, 12)]), "--output_key", "output", out=name)
    shape = [*SMALL[:3], *SMALL[5:], "--lr_scheduler", "constant", "--warmup_steps", "0"]
    whole, half = (["--dataset", f"{out}.tokens", *shape, "--ckpt_path", f"{out}_{n}.ckpt", "--save_path", f"{out}_{n}"]
                   for n in "ab")
    train("sft", *whole, "--max_steps", "2")
    train("sft", *half, "--max_steps", "1", "--save_steps", "1")
    other = os.path.abspath(f"{OUT}/other.tokens")
    said = train("sft", *half[:1], other, *half[2:], "--max_steps", "2", "--load_checkpoint", code=2)
    assert "was trained on other data than" in said, said
    train("sft", *half, "--max_steps", "2", "--load_checkpoint")
    assert content(f"{out}_a/model.safetensors") == content(f"{out}_b/model.safetensors")


def test_real_questions():
    files = [f"{DATA}/gsm8k_train.jsonl", f"{DATA}/gsm8k_preferences.jsonl"]
    if not all(map(os.path.exists, files)):
        raise Absent(f"no gsm8k_train.jsonl and gsm8k_preferences.jsonl in '{DATA}'")
    with open(files[1], encoding="utf-8") as file:
        pairs = lines("real", [dict(json.loads(line), question=json.loads(line)["prompt"]) for _, line in zip(range(60), file)])
    stages("real", files[0], pairs, "question", "answer")


class Absent(Exception):
    """Not here."""


def main():
    os.makedirs(OUT, exist_ok=True)
    make_folders()
    failed = 0
    for name, test in [(n, t) for n, t in globals().items() if n.startswith("test_")]:
        name = name.replace("test_", "prepare_")
        try:
            test()
            print(f"ok {name}", flush=True)
        except Absent as why:
            print(f"skip {name}: {why}", flush=True)
        except Exception as why:
            failed += 1
            at = traceback.extract_tb(why.__traceback__)
            at = [one.lineno for one in at if one.filename == __file__]
            print(f"FAIL {name}: line {at[-1]}: {type(why).__name__} {why}"[:600].replace("\n", "\\n"), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
