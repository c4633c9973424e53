#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""Texts to tokens: a data set and a model's folder become one token file, which the trainers read in the place of text.

    python3 demos/prepare.py --pretrain FOLDER --dataset train.jsonl --input_key messages --apply_chat_template \\
        --output train.tokens

The folder's tokenizer.json and chat template decide what the tokens are; demos/trainer/data/token_file.h says what the file is like.
Needs Python 3.9 and the packages tokenizers and jinja2 (for .parquet also pyarrow).

A document is the chat template's text of a conversation or, without --apply_chat_template, prompt and response:

  chat      The whole text is tokenized once, and character spans become tokens by the tokenizer's offsets, so a token is what
            it is in the model's own use. What the assistant says is what the template marks by {% generation %}; where it
            marks nothing, the text that a turn adds behind the generation prompt, up to its stop token.
  no chat   Prompt and response are tokenized apart, so that a prompt has the same tokens here and where a text is sampled for
            it. What a tokenizer puts before a text (a space, often) it does not put before the response, which goes on in a
            text. What its post-processor puts before a text (BOS, if anything) stands before the prompt; EOS ends the response,
            once, whatever the post-processor does.

Messages are {"role", "content"}, where content may be a list of parts of text, or ShareGPT's {"from", "value"}. A record with
"instruction" is Alpaca's, if no --input_key is given: its prompt is instruction and input below each other, its response output.
OpenOrca, full-hh-rlhf, oasst1_pairwise_rlhf_reward, chatbot_arena_conversations and webgpt_comparisons are known by their keys, if no
option names keys, and read as OpenRLHF 0.2 read them; of each there is a notice.
Pairs without a key of the prompt begin with it: it ends at the last "Assistant:" of both, or where the first turn or word differs.

--template NAME writes conversations as LLaMA-Factory 0.9.5 does: what stands before an answer and the answer are tokenized
apart, a piece at a time, and the answer is learnt with all that the template puts behind it. --dataset_info says of each set
what LLaMA-Factory's dataset_info.json says of it.

--train_on says what is learnt: assistant, what the assistant says in every turn; last, in the last turn alone; all, every token.
Pairs and labelled responses are always about the last turn, and end with its stop token.

--kind steps is for process reward models: the text is tokenized as it is, without BOS and EOS, and each --placeholder_token in it has
a label: one of --reward_tokens (without these any token), or a number from 0 to 1, the share of the first of two of them.
"""
import argparse
import array
import bisect
import collections
import concurrent.futures
import contextlib
import ctypes
import datetime
import gzip
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
import unicodedata
import zlib

KINDS = {"sft": 1, "pairs": 2, "labelled": 3, "prompts": 4, "steps": 5}
# Names of the sections, as in token_file.h.
OFFSETS, IDS, MASK, STOPS, WORD_OFFSETS, WORDS, WORD_FLAGS, ABOUT, MARGINS, LABELS, PROMPT_OFFSETS, PROMPTS, ANSWER_OFFSETS, \
    ANSWERS, TARGETS, SHARES, CHOICES = range(1, 18)
MAGIC, VERSION, HEADER, ENTRY, ALIGNED = b"\x89SEQTOK\n", 1, 96, 32, 64
BATCH = 256          # records that a process takes at a time
GROUP = 1000         # texts that LLaMA-Factory makes blocks of at a time
STREAM = 1 << 22     # characters of plain text that it takes at a time
AROUND = 256         # and those around them that it sees
ALL_SAMPLES = 100000000
MARK_BEGIN, MARK_END = "\ufdd0", "\ufdd1"  # noncharacters: no text holds them
MOST_WORDS = 1 << 24  # ids are below it; as SEQPAR_MAX_VOCAB
MOST_CHOICES = 16     # as SEQPAR_MAX_CHOICES
IGNORED = -100        # as SEQPAR_IGNORE
LONGEST = 60          # seconds that a template has for one text
TEMPLATE_FILES = "chat_template.jinja, chat_template.json or a chat_template in tokenizer_config.json"


class Refused(Exception):
    """One sentence: what is wrong, with the values, and the fix."""


class TooLong(Refused):
    """A template that does not end."""


def shown(why):
    """Without characters that would move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(why))


def reason(why):
    return f"{type(why).__name__} {why}".strip()


# ---- the folder -------------------------------------------------------------------------------------------------------------


def read_json(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as why:
        raise Refused(f"{path} cannot be read: {why}; take it anew from where the model is from")
    if not isinstance(found, dict):
        raise Refused(f"{path} is no JSON object; take it anew from where the model is from")
    return found


def read_tokenizer(folder):
    path = os.path.join(folder, "tokenizer.json")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as why:
        others = [name for name in ("tokenizer.model", "vocab.json") if os.path.exists(os.path.join(folder, name))]
        if others:
            raise Refused(f"{folder} has {others[0]}, but no tokenizer.json, which is what is read; make one: python3 -c \"from "
                          f"transformers import AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('{folder}')\"")
        raise Refused(f"{path} cannot be read: {why.strerror}; give the folder of a model with its tokenizer as --pretrain")


def parts(node):
    """A normalizer, pre-tokenizer or decoder, and those that it is a sequence of."""
    if not isinstance(node, dict):
        return []
    inner = next((node[key] for key in ("normalizers", "pretokenizers", "decoders") if key in node), [])
    return [node] + [part for one in inner for part in parts(one)]


def without_prefix(tokenizer):
    """The same tokenizer for a text that goes on: it puts no space before it."""
    tokenizer = json.loads(json.dumps(tokenizer))
    for part in parts(tokenizer.get("normalizer")):
        if part["type"] == "Prepend":
            part.update(type="Replace", pattern={"String": ""}, content="")
            part.pop("prepend", None)
    for key in ("normalizer", "pre_tokenizer"):
        if isinstance(tokenizer.get(key), dict):
            tokenizer[key] = pruned(tokenizer[key])
    for part in parts(tokenizer.get("pre_tokenizer")):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif "add_prefix_space" in part:
            part["add_prefix_space"] = False
    return tokenizer


def pruned(node):
    """Without the normalizers that no longer do anything."""
    if node["type"] != "Sequence":
        return None if node.get("pattern") == {"String": ""} else node
    key = "normalizers" if "normalizers" in node else "pretokenizers"
    return {**node, key: [part for part in map(pruned, node[key]) if part]}


def byte_of_character():
    """GPT-2's table: every byte as a character that can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return {**{chr(b): b for b in seen}, **{chr(256 + i): b for i, b in enumerate(hidden)}}


def word_of_bytes(token, table):
    try:
        return bytes(table[c] for c in token)
    except KeyError:
        return token.encode()


def decoder_of(tokenizer):
    """What a token of the model's own vocabulary stands for, as bytes: a function of its text."""
    replaced, fallback, by_byte = [], False, False
    for part in parts(tokenizer.get("decoder")):
        if part["type"] == "ByteLevel":
            by_byte = True
        elif part["type"] == "Metaspace":
            replaced.append((part["replacement"], " "))
        elif part["type"] == "Replace" and "String" in part["pattern"]:
            replaced.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "ByteFallback":
            fallback = True
        elif part["type"] not in ("Sequence", "Fuse", "Strip"):  # Strip: of the first token of a text
            raise Refused(f"tokenizer.json has a decoder {part['type']}, which is not understood; ByteLevel, Metaspace, Replace, "
                          "ByteFallback, Fuse and Strip are")
    if not (by_byte or replaced or fallback):
        raise Refused("tokenizer.json has no decoder, so nothing says which text a token stands for; take a tokenizer that has one")
    table = byte_of_character()

    def word(token):
        if fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return word_of_bytes(token, table) if by_byte else token.encode()

    return word


def token_text(value):
    return value.get("content") if isinstance(value, dict) else value


def first_id(value):
    return value[0] if isinstance(value, list) and value else value


class Folder:
    """The tokenizer of a model, and what the folder says of its use."""

    def __init__(self, folder):
        import tokenizers
        raw = read_tokenizer(folder)
        self.name, self.crc, self.size = folder, zlib.crc32(raw), len(raw)
        try:
            self.json = json.loads(raw)
            self.fresh = tokenizers.Tokenizer.from_str(raw.decode())
            bare = without_prefix(self.json)
            self.going_on = self.fresh if bare == self.json else tokenizers.Tokenizer.from_str(json.dumps(bare))
        except Exception as why:  # the package raises plain Exception
            raise Refused(f"{folder}/tokenizer.json is not understood by tokenizers {tokenizers.__version__}: {why}; "
                          "pip install -U tokenizers, or take the file anew")
        for one in (self.fresh, self.going_on):
            one.no_truncation()
            one.no_padding()
        self.config = read_json(folder, "tokenizer_config.json")
        self.generation = read_json(folder, "generation_config.json")
        self.model = read_json(folder, "config.json")
        try:
            self.special = self.special_texts()
            self.ids()
            self.words()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as why:
            raise Refused(f"{folder}/tokenizer.json or a file beside it holds what is not understood: {reason(why)}; take them "
                          "anew")

    def special_texts(self):
        """bos_token, eos_token and so on, as templates know them."""
        texts = {}
        for source in (read_json(self.name, "special_tokens_map.json"), self.config):
            texts.update({key: token_text(value) for key, value in source.items()
                          if key.endswith("_token") and isinstance(token_text(value), str)})
        for key in ("bos_token", "eos_token"):
            ids = [first_id(source.get(f"{key}_id")) for source in (self.model, self.generation)]
            named = next(filter(None, map(self.token_of, ids)), None)
            if key not in texts and named:
                texts[key] = named
        return texts

    def token_of(self, i):
        return self.fresh.id_to_token(i) if isinstance(i, int) and 0 <= i < MOST_WORDS else None

    def id_of(self, key):
        text = self.special.get(key)
        found = self.fresh.token_to_id(text) if text is not None else None
        return -1 if found is None else found

    def ids(self):
        self.bos, self.eos, self.pad = (self.id_of(f"{name}_token") for name in ("bos", "eos", "pad"))
        if self.eos < 0:
            raise Refused(f"{self.name} names no eos_token that its tokenizer has (it says {self.special.get('eos_token')!r}); "
                          "name it in tokenizer_config.json")
        listed = self.generation.get("eos_token_id", [])
        listed = [i for i in (listed if isinstance(listed, list) else [listed]) if i is not None and i != self.eos]
        self.stops = [self.eos, *dict.fromkeys(i for i in listed if self.token_of(i) is not None)]
        self.nothing = [i for i in listed if self.token_of(i) is None]
        # what the post-processor puts before a text; what it puts behind is EOS, which stands where a response ends
        bare, whole = (self.fresh.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((i for i in range(len(whole) + 1) if whole[i:i + len(bare)] == bare), 0)
        self.prefix = whole[:at]

    def end_with(self, token, why):
        """From now on texts end with this token, which must be one that no text is split into."""
        added = next((one["id"] for one in self.json.get("added_tokens") or [] if one["content"] == token), None)
        if added is None:
            raise Refused(f"{why} ends what is said with {token}, which {self.name}/tokenizer.json has not among its added_tokens; "
                          "give the template that the model was made for, or a model that has the token")
        self.eos, self.stops = added, list(dict.fromkeys([added, *self.stops]))
        self.special["eos_token"] = token

    def words(self):
        """The table id -> bytes. Added tokens stand for themselves."""
        vocabulary, word = self.fresh.get_vocab(True), decoder_of(self.json)
        self.vocab = max(vocabulary.values()) + 1
        if self.vocab > MOST_WORDS:
            raise Refused(f"{self.name}/tokenizer.json has a token with the id {self.vocab - 1}; {MOST_WORDS - 1} is the last that "
                          "can be read, take the file anew")
        self.word, self.flags = [b""] * self.vocab, bytearray(self.vocab)
        for token, i in vocabulary.items():
            self.word[i] = word(token)
        for added in self.json.get("added_tokens") or []:
            if not 0 <= added["id"] < self.vocab:
                raise Refused(f"{self.name}/tokenizer.json gives {added['content']!r} the id {added['id']}, but its vocabulary "
                              f"ends at {self.vocab - 1}; take the file anew")
            self.word[added["id"]] = added["content"].encode()
            self.flags[added["id"]] = bool(added.get("special"))
        named = self.json["model"].get("unk_token")
        self.unknown = self.json["model"].get("unk_id") if named is None else self.fresh.token_to_id(named)

    def notices(self):
        if self.nothing:
            yield f"generation_config.json has {self.nothing} among its eos_token_id, which no token has; left out"
        wanted = self.config.get("add_bos_token")
        if isinstance(wanted, bool) and self.bos >= 0 and wanted != (self.bos in self.prefix):
            yield (f"tokenizer_config.json says add_bos_token {str(wanted).lower()}, tokenizer.json puts {self.prefix} before a "
                   "text; tokenizer.json is followed")


# ---- the chat template ------------------------------------------------------------------------------------------------------


def template_text(given, folder):
    if given is not None:
        if os.path.isfile(given):
            with open(given, encoding="utf-8") as file:
                return file.read()
        if "{" not in given:
            raise Refused(f"--tokenizer_chat_template is {given!r}, which is neither a file nor a template; give one of them")
        return given
    path = os.path.join(folder.name, "chat_template.jinja")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    found = read_json(folder.name, "chat_template.json").get("chat_template") or folder.config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise Refused(f"{folder.name} has no chat template ({TEMPLATE_FILES}); give one by --tokenizer_chat_template, or leave out "
                      "--apply_chat_template and shape prompts by --input_template")
    return found


def template_environment(now):
    """The one that transformers has; {% generation %} leaves marks in the text."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller):
            return MARK_BEGIN + caller() + MARK_END

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


@contextlib.contextmanager
def limited(seconds):
    """For a thread that signals interrupt, which is the first."""
    def ended(number, frame):
        raise TooLong(f"the chat template takes more than {seconds} seconds for one text; give another by "
                      "--tokenizer_chat_template")
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Template:
    def __init__(self, text, folder, now):
        import jinja2
        self.error = jinja2.exceptions.TemplateError
        self.special = folder.special
        self.stops = tuple(folder.word[i].decode(errors="replace") for i in folder.stops if i < folder.vocab)
        self.marked = re.search(r"{%-?\s*generation\s*-?%}", text) is not None
        try:
            self.template = template_environment(now).from_string(text)
            self.template.globals = dict(self.template.globals)  # as it is, each rendering walks through two of them
        except Exception as why:  # a template may hold any constant arithmetic
            raise Refused(f"the chat template is no Jinja: {reason(why)}; look at --tokenizer_chat_template or the folder's own")

    def marks(self, messages, tools, prompt):
        try:
            with limited(LONGEST):
                return self.template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
                                            **self.special)
        except TooLong:
            raise
        except Exception as why:  # whatever a template can do
            said = why if isinstance(why, self.error) else reason(why)
            raise Refused(f"the chat template does not take these {len(messages)} messages: {said}; change them, or give another "
                          "template by --tokenizer_chat_template")

    def render(self, messages, tools=None, prompt=False):
        text = self.marks(messages, tools, prompt)
        return text.replace(MARK_BEGIN, "").replace(MARK_END, "") if self.marked else text

    def rendered(self, messages, tools):
        try:
            return self.render(messages, tools)
        except TooLong:
            raise
        except Refused:
            return None

    def settled(self, messages, tools):
        """The same messages, with null for the text beside a tool call if the template takes it, otherwise with an empty one.
        What a template does not write would not be learnt: refused."""
        names = [name for message in messages for name in called(message)]
        if not names:
            return messages
        hollow = [{**message, "content": message["content"] or ""} for message in messages]
        silent = [{key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
                  for message in hollow]
        bare, empty = self.rendered(silent, tools) or "", self.rendered(hollow, tools)
        for tried, text in ((messages, self.rendered(messages, tools)), (hollow, empty)):
            written = text is not None and all(text.count(name) - bare.count(name) >= names.count(name) for name in names)
            if written and text.count("None") <= (text if empty is None else empty).count("None"):
                return tried
        raise Refused(f"the chat template does not write the tool call {names[0]!r}; give a template that does by "
                      "--tokenizer_chat_template, or remove the record")

    def ended(self, text, begin):
        """Where a turn ends that begins there: with its stop token, which nothing is sampled behind."""
        bare = text.rstrip()
        return len(bare) if len(bare) > begin and bare.endswith(self.stops) else len(text)

    def turns(self, messages, tools, last):
        """The text of a conversation, and where the assistant speaks in it."""
        which = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if not which:
            raise Refused(f"none of the {len(messages)} messages is the assistant's, so there is nothing to learn; add one, remove "
                          "the record or take --train_on all")
        if self.marked:
            return self.turns_by_marks(messages, tools, which, last)
        return self.turns_by_prefixes(messages, tools, which[-1:] if last else which)

    def turns_by_marks(self, messages, tools, which, last):
        text, spans, at = "", [], 0
        for piece in re.split(f"([{MARK_BEGIN}{MARK_END}])", self.marks(messages, tools, False)):
            if piece == MARK_BEGIN:
                at = len(text)
            elif piece == MARK_END:
                spans.append((at, len(text)))
            else:
                text += piece
        if last:
            spans = spans[self.marks(messages[:which[-1]], tools, False).count(MARK_END):]
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise Refused("the chat template's {% generation %} marks nothing in this conversation; put it around what the "
                          "assistant says")
        return text, spans

    def turns_by_prefixes(self, messages, tools, which):
        text, spans = self.render(messages, tools), []
        for k in which:
            before = self.render(messages[:k], tools, True)
            after = text if k + 1 == len(messages) else self.render(messages[:k + 1], tools)
            if not (text.startswith(after) and after.startswith(before) and len(before) < len(after)):
                raise Refused(f"the chat template writes the conversation up to message {k + 1} otherwise alone than as a part of "
                              "the whole, so what the assistant says there cannot be found; put {% generation %} and "
                              "{% endgeneration %} around it in a template for --tokenizer_chat_template, or take --train_on last "
                              "or all")
            span = (len(before), self.ended(after, len(before)))
            said = messages[k].get("content")
            if isinstance(said, str) and said.strip() not in text[span[0]:span[1]]:
                raise Refused(f"the chat template leaves out or changes what the assistant says in message {k + 1} "
                              f"({said.strip()[:40]!r} became {text[span[0]:span[1]][:40]!r}); change the message, or mark what is "
                              "learnt by {% generation %} in a template for --tokenizer_chat_template")
            spans.append(span)
        return text, spans

    def stops_turns(self):
        """Does a turn end in a token that sampling stops at?"""
        try:
            text, spans = self.turns([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, True)
        except Refused:
            return True  # it is for other conversations
        return text[:spans[-1][1]].rstrip().endswith(self.stops)


# ---- templates by name ------------------------------------------------------------------------------------------------------


BOS, EOS = "bos", "eos"
CHATML = {"system": ["<|im_start|>system\n{}<|im_end|>\n"],
          "user": ["<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"],
          "assistant": ["{}<|im_end|>\n"], "ends": "<|im_end|>"}
LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
# What LLaMA-Factory 0.9.5 makes of each message, in pieces that it tokenizes apart; (BOS,) and (EOS,) are these tokens. ends: the
# tokenizer's EOS from then on. inside: the system's text stands in the first user's message. verify/second/golden_templates.json has its
# own renderings.
TEMPLATES = {
    "chatml": CHATML,
    "llama3": {"begin": [(BOS,)], "system": [LLAMA3.format("system") + "{}<|eot_id|>"],
               "user": [LLAMA3.format("user") + "{}<|eot_id|>" + LLAMA3.format("assistant")],
               "assistant": ["{}<|eot_id|>"], "ends": "<|eot_id|>", "text_ends": "<|end_of_text|>"},
    "mistral": {"begin": [(BOS,)], "system": ["{}\n\n"], "inside": True, "user": ["[INST] {}[/INST]"],
                "assistant": [" {}", (EOS,)]},
    "qwen": {**CHATML, "default": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
    "zephyr": {"system": ["<|system|>\n{}", (EOS,)], "user": ["<|user|>\n{}", (EOS,), "<|assistant|>\n"],
               "assistant": ["{}", (EOS,)], "default": "You are Zephyr, a helpful assistant."}}


class NamedTemplate:
    """Conversations as pairs of what is asked and what is said, each a list of texts and ids."""

    def __init__(self, name, folder, system):
        self.form, self.name, self.folder = TEMPLATES[name], name, folder
        self.default = self.form.get("default", "") if system is None else system
        if "ends" in self.form:
            folder.end_with(self.form["ends"], f"--template {name}")
        self.tokens = {BOS: [folder.bos] * (folder.bos >= 0), EOS: [folder.eos]}

    def piece(self, role, content):
        made = []
        for part in self.form[role]:
            made += self.tokens[part[0]] if isinstance(part, tuple) else [part.replace("{}", content, 1)]
        return [part for part in made if part != ""]

    def checked(self, messages, ends):
        first = messages[0]["role"] == "system"
        for i, message in enumerate(messages[first:]):
            if message["role"] != ("user", "assistant")[i % 2] or called(message) or message["content"] is None:
                raise Refused(f"message {first + i + 1} is of {message['role']}{' and calls a function' * bool(called(message))}, "
                              f"but --template {self.name} writes texts of user and assistant by turns; calls are written by "
                              "--apply_chat_template, or remove the record")
        if messages[-1]["role"] != ends:
            raise Refused(f"the last of {len(messages)} messages is of {messages[-1]['role']}, but that of the {ends} is needed; "
                          "end the conversation there")
        return (messages[0]["content"] if first else "") or self.default, messages[first:]

    def pairs(self, messages, ends="assistant"):
        system, messages = self.checked(messages, ends)
        sides = []
        for i, message in enumerate(messages):
            side, content = [], message["content"]
            if i == 0:
                side += [part for begin in self.form.get("begin", []) for part in self.tokens[begin[0]]]
                if system and self.form.get("inside"):
                    content = self.form["system"][0].replace("{}", system, 1) + content
                elif system:
                    side += self.piece("system", system)
            sides.append(side + self.piece(message["role"], content))
        return [tuple(sides[i:i + 2]) for i in range(0, len(sides), 2)]

    def draft(self, messages, o, ends="assistant"):
        turns = self.pairs(messages, ends)
        if o.kind != "sft" and len(turns) > 1:  # only the last answer is learnt: what was said before is its prompt
            turns = [([part for turn in turns[:-1] for side in turn for part in side] + turns[-1][0], *turns[-1][1:])]
        return Draft(turns=turns, supervised=o.train_on == "all", last=o.train_on == "last")

    def text(self, draft):
        """As a person reads it."""
        parts = [part for turn in draft.turns for side in turn for part in side]
        return "".join(part if isinstance(part, str) else self.folder.word[part].decode(errors="replace") for part in parts)


# ---- documents --------------------------------------------------------------------------------------------------------------


def canonical(text):
    """Without what a normalizer may change."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().replace("\u2581", " ").split())


class Draft:
    """A document whose texts wait for the tokenizer: a conversation, or prompt and response. turns: of a template by name, what is
    asked and what is said in pieces, later where these begin and end."""
    __slots__ = ("text", "spans", "prompt", "response", "supervised", "ends", "trims", "turns", "last", "ids", "mask",
                 "prompt_tokens", "labels")

    def __init__(self, text=None, spans=None, prompt=None, response=None, supervised=False, ends=False, trims=False, turns=None,
                 last=False):
        self.text, self.spans, self.prompt, self.response = text, spans, prompt, response
        self.supervised, self.ends, self.trims, self.turns, self.last = supervised, ends, trims, turns, last
        self.labels = None  # of steps: target and share of each placeholder

    def texts(self):
        """What the tokenizer is given as texts of their own."""
        if self.turns:
            return [part for turn in self.turns for side in turn for part in side if isinstance(part, str)]
        return [self.prompt if self.text is None else self.text]


MISSING = object()


def looked_up(record, key):
    """What stands under a key: "a.b" is b inside a, unless a key is called that."""
    if key in record:
        return record[key]
    for part in key.split("."):
        if not isinstance(record, dict) or part not in record:
            return MISSING
        record = record[part]
    return record


SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
            "function_call": "assistant", "observation": "tool", "tool": "tool"}  # in ShareGPT


def shared_gpt(message, where):
    """{"from", "value"} as {"role", "content"}."""
    speaker, said = message["from"], message.get("value")
    if speaker not in SPEAKERS:
        raise Refused(f"{where} is from {json.dumps(speaker)[:40]}; {', '.join(SPEAKERS)} are known")
    more = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**more, "role": SPEAKERS[speaker], "content": said}
    try:
        calls = json.loads(said)
    except (TypeError, ValueError):
        raise Refused(f"{where} is from function_call, but its value is no JSON: {json.dumps(said)[:60]}")
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {**more, "role": "assistant", "content": None, "tool_calls": calls}


def called(message):
    """The functions that a message calls."""
    calls = message.get("tool_calls") or []
    calls = [*(calls if isinstance(calls, list) else [calls]), *filter(None, [message.get("function_call")])]
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Refused(f"a tool call is {json.dumps(calls)[:60]}, but it is an object with \"name\" and \"arguments\"")
    return [call["name"] for call in calls]


def content_of(message, where):
    """Text; null beside a tool call. Parts of text are joined."""
    said = message.get("content")
    if said is None and called(message):
        return None
    if isinstance(said, list):
        other = next((part for part in said if not isinstance(part, dict) or part.get("type") != "text" or
                      not isinstance(part.get("text"), str)), None)
        if other is not None:
            raise Refused(f"{where} has a part {json.dumps(other)[:60]}, but only parts of type text can be read; remove it")
        return "".join(part["text"] for part in said)
    if not isinstance(said, str):
        raise Refused(f"{where} has the content {json.dumps(said)[:40]}, but text is needed; fill it or remove the record")
    return said


def message_of(message, where):
    if isinstance(message, dict) and isinstance(message.get("from"), str) and "role" not in message:
        message = shared_gpt(message, where)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{where} is {json.dumps(message)[:60]}, but a message is an object with \"role\" and \"content\"")
    message = {key: value for key, value in message.items() if value is not None}  # .parquet has a null for each absent key
    for key in ("weight", "train", "training"):
        if key in message and message[key] != 1:
            raise Refused(f"{where} has \"{key}\": {json.dumps(message[key])}, which says that it is not learnt; that is not supported: end the "
                          "conversation before it, or leave the key out")
    return {**message, "content": content_of(message, where)}


def alpaca_before(record):
    """What stands before its instruction: the system's text and what was said before."""
    first, past = record.get("system"), record.get("history") or []
    pairs = [pair for pair in past if isinstance(pair, list) and len(pair) == 2] if isinstance(past, list) else None
    if pairs is None or len(pairs) < len(past):
        raise Refused(f"\"history\" is {json.dumps(past)[:40]}, but a list of [prompt, response] is needed")
    turns = [("system", first)] if first else []
    turns += [turn for asked, said in pairs for turn in (("user", asked), ("assistant", said))]
    return [message_of({"role": role, "content": said}, f'"{"system" if role == "system" else "history"}"') for role, said in turns]


def tools_of(record):
    tools = record.get("tools")
    tools = tools.strip() if isinstance(tools, str) else tools
    if tools and isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            pass
    if tools and not isinstance(tools, list):
        raise Refused(f"\"tools\" is {json.dumps(tools)[:40]}, but a list of functions is needed")
    return tools or None


def alike(one, other):
    return one["role"] == other["role"] and (one["content"] or "").strip() == (other["content"] or "").strip()


def joined(shared, side, key):
    """A prompt and what goes on from it, which may begin with the prompt, or some of it, once more."""
    if side[0]["role"] == "assistant":
        return shared + side
    for n in range(min(len(shared), len(side)), 0, -1):
        if all(map(alike, shared[-n:], side)):
            return shared[:-n] + side
    begin = next((i for i in range(len(side) - len(shared)) if all(map(alike, shared, side[i:]))), None)
    if begin is not None:
        return side
    if shared[-1]["role"] == side[0]["role"] or side[0]["role"] == "system":
        raise Refused(f"\"{key}\" begins with a message of the {side[0]['role']}, "
                      f"{json.dumps(side[0]['content'], ensure_ascii=False)[:40]}, which is not the prompt's "
                      f"{json.dumps(shared[-1]['content'], ensure_ascii=False)[:40]}; leave out the key of the prompt if "
                      f"\"{key}\" holds the whole conversation")
    return shared + side


class LeftOut(Exception):
    """A record that says nothing about which of two answers is the better one."""


# Sets that OpenRLHF 0.2 knew by the keys of their records, so that its commands name none. A prompt stands in this form,
# unless --input_template says otherwise; those of full-hh-rlhf and oasst1 hold their speakers already.
FORM_OF_SETS = "Human: {}\nAssistant: "


def spoken(record):
    """A prompt that names its speakers: its set and its text; None: there is none."""
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        return None
    if prompt.startswith("prompter:"):
        turns = prompt.replace("prompter:", "\nHuman: ").replace("assistant:", "\nAssistant: ")
        return "tasksource/oasst1_pairwise_rlhf_reward", turns + "\nAssistant: "
    return ("Dahoas/full-hh-rlhf", prompt) if prompt.rstrip().endswith("Assistant:") else None


def as_lines(conversation, form, key):
    """A conversation as text: what the user says in the form, what the assistant says on the next line."""
    if not isinstance(conversation, list):
        raise Refused(f"\"{key}\" is {json.dumps(conversation)[:40]}, but a list of messages is needed")
    turns = [message_of(turn, f"\"{key}\"[{i}]") for i, turn in enumerate(conversation)]
    return "\n".join(form.replace("{}", turn["content"]) if turn["role"] == "user" else turn["content"] for turn in turns)


def question_of(record):
    question = record.get("question")
    return question.get("full_text") if isinstance(question, dict) else None


def orca(record):
    return all(isinstance(record.get(key), str) for key in ("system_prompt", "question", "response"))


def arena_pair(record, form):
    if record.get("winner") not in ("model_a", "model_b"):
        raise LeftOut
    better, worse = (f"conversation_{side}" for side in ("ab" if record["winner"] == "model_a" else "ba"))
    return "lmsys/chatbot_arena_conversations", None, [as_lines(record[key], form, key) for key in (better, worse)]


def webgpt_pair(record, form):
    scores, answers = ([record.get(f"{key}_{side}") for side in (0, 1)] for key in ("score", "answer"))
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in scores):
        raise Refused(f"\"score_0\" and \"score_1\" are {json.dumps(scores)[:40]}, but two numbers are needed")
    if scores[0] == scores[1]:
        raise LeftOut
    sides = answers if scores[0] > scores[1] else answers[::-1]
    return "openai/webgpt_comparisons", form.replace("{}", question_of(record)), sides


def known_pair(record, form):
    """Its set, the prompt (None: the answers hold it) and both answers, the better one first; None: of no known set."""
    if "winner" in record and "conversation_a" in record and "conversation_b" in record:
        return arena_pair(record, form)
    if question_of(record) and all(isinstance(record.get(key), str) for key in ("answer_0", "answer_1")):
        return webgpt_pair(record, form)
    found = spoken(record) if "chosen" in record and "rejected" in record else None
    return found and (*found, [record["chosen"], record["rejected"]])


def known_prompt(record, form):
    """Its set and the prompt; None: of no known set."""
    if orca(record):
        return "Open-Orca/OpenOrca", form.replace("{}", record["system_prompt"] + "\n" + record["question"])
    if "winner" in record and isinstance(record.get("conversation_a"), list):
        return "lmsys/chatbot_arena_conversations", as_lines(record["conversation_a"][:-1], form, "conversation_a")
    if question_of(record) and "answer_1" in record:
        return "openai/webgpt_comparisons", form.replace("{}", question_of(record))
    return spoken(record)
# ---- what dataset_info.json says of a set -----------------------------------------------------------------------------------


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": None, "messages": "conversations",
           "system": None, "tools": None, "chosen": None, "rejected": None, "kto_tag": None}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation",
        "function_tag": "function_call", "system_tag": "system"}
FORMATS = ("alpaca", "sharegpt", "openai", "messages", "completion")
ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"], "tool": ["tool"]}
COMPLETIONS = 64  # documents that axolotl makes of one text at most


class Lapsed(Exception):
    """A record that LLaMA-Factory leaves out, too."""


class Info:
    """Records of one set, as messages: what LLaMA-Factory reads of them, or axolotl (the formats messages and completion)."""

    def __init__(self, said, kind, plain):
        self.format, self.most = said.get("formatting", "alpaca"), said.get("max_samples", ALL_SAMPLES)
        # of those that are named, others are not there
        self.columns = {**dict.fromkeys(COLUMNS), **said["columns"]} if "columns" in said else COLUMNS
        self.tags = {**dict.fromkeys(TAGS), **said["tags"]} if "tags" in said else TAGS
        self.kind, self.plain, self.blocks = kind, plain, bool(said.get("blocks"))
        if self.format == "messages":
            self.tags = {"role_tag": "role", "content_tag": "content", **said.get("tags", {})}
            self.roles = {word: role for role, words in said.get("roles", ROLES).items() for word in words}
        if self.format not in FORMATS:
            raise Refused(f"--dataset_info has the formatting {self.format!r}; {', '.join(FORMATS)} are known")

    def column(self, record, name, needed=True):
        key = self.columns[name]
        if not key:
            return None
        if key not in record and needed:
            raise Refused(f"no key \"{key}\", which dataset_info has as {name}; keys: {', '.join(map(repr, record)) or 'none'}")
        return record.get(key)

    def text(self, record, name):
        found = self.column(record, name)
        if found is not None and not isinstance(found, str):
            raise Refused(f"\"{self.columns[name]}\" is {json.dumps(found)[:40]}, but text is needed")
        return found or ""

    def message(self, said, where):
        tags = self.tags
        if isinstance(said, dict) and (said.get("tool_calls") or said.get("train") is False or said.get("training") is False):
            raise Refused(f"{where} calls a tool or is not learnt, which is not read here; remove it, or the record")
        if not isinstance(said, dict) or tags["role_tag"] not in said or not isinstance(said.get(tags["content_tag"]), str):
            raise Refused(f"{where} is {json.dumps(said)[:60]}, but an object with \"{tags['role_tag']}\" and text as "
                          f"\"{tags['content_tag']}\" is needed")
        if self.format == "messages":
            return {"role": self.roles.get(said[tags["role_tag"]], said[tags["role_tag"]]), "content": said[tags["content_tag"]]}
        roles = {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant", tags["observation_tag"]: "observation",
                 tags["function_tag"]: "function", tags["system_tag"]: "system"}
        return {"role": roles.get(said[tags["role_tag"]], "?"), "content": said[tags["content_tag"]]}

    def alpaca(self, record):
        history = self.column(record, "history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise Refused(f"\"{self.columns['history']}\" is {json.dumps(history)[:40]}, but a list of [prompt, response] is needed")
        asked = "\n".join(filter(None, (self.text(record, "prompt"), self.text(record, "query"))))
        turns = [*((role, said) for pair in history for role, said in zip(("user", "assistant"), pair)), ("user", asked)]
        return self.text(record, "system"), [{"role": role, "content": said or ""} for role, said in turns]

    def shared(self, record):
        key, said = self.columns["messages"], self.column(record, "messages")
        if not isinstance(said, list):
            raise Refused(f"\"{key}\" is {json.dumps(said)[:40]}, but a list of messages is needed")
        turns = [self.message(one, f"\"{key}\"[{i}]") for i, one in enumerate(said)]
        if turns and turns[0]["role"] == "system" and self.format != "messages":
            return turns[0]["content"], turns[1:]
        return self.text(record, "system"), turns

    def conversed(self, record, turns):
        """A conversation as it is, of axolotl."""
        made = {"messages": turns}
        if self.kind == "pairs":
            made.update({side: turns + self.answer(record, side) for side in ("chosen", "rejected")})
        if self.kind == "labelled":
            made["label"] = self.column(record, "kto_tag")
        return made

    def answer(self, record, name):
        said = self.column(record, name)
        if self.format == "alpaca":
            return [{"role": "assistant", "content": self.text(record, name)}]
        return [self.message(said, f"\"{self.columns[name]}\"")]

    def converted(self, record):
        """The record with the keys that Maker reads: messages, chosen, rejected, label; or text."""
        if self.column(record, "tools", False) not in (None, "", [], "[]"):
            raise Refused("it has tools, which no template by name writes here; remove them, or the record")
        if self.format == "completion":
            return {"text": self.text(record, "prompt")}
        if self.format == "messages":
            return self.conversed(record, self.shared(record)[1])
        system, turns = self.alpaca(record) if self.format == "alpaca" else self.shared(record)
        if self.plain:
            return {"text": turns[0]["content"] if turns else ""}
        if self.format == "alpaca" and self.kind in ("sft", "labelled"):
            if self.column(record, "response") is None:
                raise Lapsed
            turns += self.answer(record, "response")
        ends = "user" if self.kind == "pairs" or (self.kind == "prompts" and len(turns) % 2) else "assistant"
        for i, turn in enumerate(turns):
            if turn["role"] not in (("user", "observation"), ("assistant", "function"))[i % 2]:
                raise Lapsed
        if not turns or (turns[-1]["role"] in ("user", "observation")) != (ends == "user"):
            raise Lapsed
        if self.kind == "prompts" and ends == "assistant":
            turns = turns[:-1]
        return self.conversed(record, [{"role": "system", "content": system}] * bool(system) + turns)


def infos_of(o):
    """One for each set."""
    try:
        said = json.loads(o.dataset_info)
    except ValueError as why:
        raise Refused(f"--dataset_info is no JSON: {why}; give a list with an object for each set")
    if not isinstance(said, list) or not all(isinstance(one, dict) for one in said) or len(said) != len(o.dataset.split(",")):
        raise Refused(f"--dataset_info has {len(said) if isinstance(said, list) else 'no list of'} objects for "
                      f"{len(o.dataset.split(','))} data sets; give one for each")
    return [Info(one, o.kind, o.pretrain_mode) for one in said]


class Maker:
    """Documents of records: what a process of --workers has."""

    named = infos = None

    def __init__(self, options, now):
        self.o = options
        self.folder = Folder(options.pretrain)
        self.named = NamedTemplate(options.template, self.folder, options.default_system) if options.template else None
        self.template = Template(template_text(options.tokenizer_chat_template, self.folder), self.folder, now) \
            if options.apply_chat_template else self.named
        self.infos = infos_of(options) if options.dataset_info else None
        self.counts = collections.Counter()
        self.shape = {"sft": self.sft, "pairs": self.pairs, "labelled": self.labelled, "prompts": self.prompts,
                      "steps": self.steps}[options.kind]
        if options.kind == "steps":
            self.placeholder = self.token(options.placeholder_token, "--placeholder_token")
            marks = options.reward_tokens.split()
            self.choices = {one: self.token(one, "--reward_tokens") for one in marks}
            if len(set(self.choices.values())) < len(marks):
                raise Refused(f"--reward_tokens {options.reward_tokens} are not all different tokens; name each once")

    # -- what a record says --

    def value(self, record, key, option):
        found = looked_up(record, key)
        if found is not MISSING:
            return found
        raise Refused(f"no key \"{key}\"; set --{option} to one of those present: {', '.join(map(repr, record)) or 'none'}")

    def text(self, record, key, option):
        found = self.value(record, key, option)
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            raise Refused(f"\"{key}\" is a list, but text is needed; lists of messages need --apply_chat_template")
        raise Refused(f"\"{key}\" is {json.dumps(found)[:40]}, but text is needed; or set --{option}")

    def messages(self, record, key, option, role):
        found = self.value(record, key, option)
        if isinstance(found, str):
            return [{"role": role, "content": found}]
        found = [found] if isinstance(found, dict) else found
        if not isinstance(found, list) or not found:
            raise Refused(f"\"{key}\" is {json.dumps(found)[:40]}, but text or a list of messages is needed")
        listed = [message_of(message, f"\"{key}\"[{i}]") for i, message in enumerate(found)]
        first = record.get("system") if "from" in found[0] else None  # ShareGPT's, beside the conversation
        if first and key == self.o.input_key and listed[0]["role"] != "system":
            listed = [message_of({"role": "system", "content": first}, '"system"'), *listed]
        return listed

    def asks(self, record):
        """Is this Alpaca's, and no key was given that means something else?"""
        return self.o.alpaca and isinstance(record.get("instruction"), str) and ("input" in record or "output" in record)

    def asked(self, record):
        """Alpaca's record as one with a prompt, its instruction and input below each other; and the key of the response."""
        if not self.asks(record):
            return record, self.o.output_key
        more, before = record.get("input"), alpaca_before(record)
        if more is not None and not isinstance(more, str):
            raise Refused(f"\"input\" is {json.dumps(more)[:40]}, but beside \"instruction\" text is needed; or set --input_key")
        if before and not self.template:
            raise Refused("\"system\" and \"history\" need a chat template; add --apply_chat_template, or set --input_key to "
                          "leave them out")
        prompt = "\n".join(filter(None, (record["instruction"], more)))
        prompt = [*before, {"role": "user", "content": prompt}] if before else prompt
        return {**record, "input": prompt}, self.o.output_key or "output"

    def given(self, key, response):
        if not response:
            raise Refused(f"\"{key}\" is empty, but a response needs a token; fill it or remove the record")

    def formed(self, prompt):
        return self.o.input_template.replace("{}", prompt)

    def known(self, of_set, record):
        """What a record of a set that is known by its keys says, where no option names keys."""
        if not self.o.by_form or "input" in record:
            return None
        found = of_set(record, self.o.form_of_sets)
        if found:
            self.counts["set " + found[0]] += 1
        return found

    # -- records as drafts: a list of documents, and what belongs to them --

    def conversation(self, record, messages, last, trims=False):
        if self.named:
            return self.named.draft(messages, self.o)
        tools = tools_of(record)
        messages = self.template.settled(messages, tools)
        if self.o.train_on == "all" and self.o.kind == "sft":
            text = self.template.render(messages, tools)
            return Draft(text=text, spans=[(0, len(text))])
        text, spans = self.template.turns(messages, tools, last)
        return Draft(text=text, spans=spans, trims=trims)

    def whole_text(self, text):
        """LLaMA-Factory writes EOS behind a text and tokenizes both; axolotl adds its id."""
        if not self.o.pretrain_mode:
            return Draft(text=text, ends=True)
        special, config = self.folder.special, self.folder.config
        begins = config.get("add_bos_token", "Llama" in str(config.get("tokenizer_class"))) and "bos_token" in special
        text += self.named.form.get("text_ends", special["eos_token"]) if self.named else special["eos_token"]
        return Draft(turns=[([], [special["bos_token"] * (begins and not self.blocks()) + text])])

    def blocks(self):
        return bool(self.infos) and self.infos[0].blocks

    def parted(self, d):
        """axolotl makes documents of --max_len tokens of a long text."""
        ids, parts, most = d.ids[:COMPLETIONS * (self.o.max_len or len(d.ids))], [], self.o.max_len or len(d.ids)
        for at in range(0, len(ids), most):
            part = Draft()
            part.ids, part.prompt_tokens = ids[at:at + most], 0
            part.mask = bytearray(b"\1") * len(part.ids)
            parts += [part] if len(part.ids) > 1 else []
        return parts

    def sft(self, record):
        o = self.o
        if self.infos and "text" in record:
            return [self.whole_text(record["text"])], None
        record, answer = self.asked(record)
        if self.template:
            messages = self.messages(record, o.input_key, "input_key", "user")
            if answer:
                messages = joined(messages, self.messages(record, answer, "output_key", "assistant"), answer)
            return [self.conversation(record, messages, o.train_on == "last")], None
        found = self.known(known_prompt, record) if orca(record) else None
        if found:
            return [Draft(prompt=found[1], response=record["response"], supervised=o.train_on == "all", ends=True)], None
        prompt = self.text(record, o.input_key, "input_key")
        if not answer or o.pretrain_mode:
            return [Draft(prompt="", response="", text=prompt, ends=not o.pretrain_mode or o.pretrain_eos)], None
        response = self.text(record, answer, "output_key")
        return [Draft(prompt=self.formed(prompt) if response else "", response=response, supervised=o.train_on == "all",
                      ends=True)], None

    def pairs(self, record):
        o = self.o
        shared = o.prompt_key or ("input" if self.asks(record) else None)
        if not o.prompt_key:
            record, _ = self.asked(record)
        margin = looked_up(record, o.margin_key)
        margin = None if margin is MISSING else margin
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin)):
            raise Refused(f"\"{o.margin_key}\" is {json.dumps(margin)[:40]}, but a finite number is needed; or set --margin_key")
        keys = ((o.chosen_key, "chosen_key"), (o.rejected_key, "rejected_key"))
        drafts = (self.pair_of_chats if self.template else self.pair_of_texts)(record, shared, keys)
        return drafts, math.nan if margin is None else float(margin)

    def pair_of_chats(self, record, prompt_key, keys):
        shared = self.messages(record, prompt_key, "prompt_key", "user") if prompt_key else []
        for key, option in keys:
            if not shared and isinstance(self.value(record, key, option), str):
                raise Refused(f"\"{key}\" is text, which answers no prompt; give --prompt_key, or lists of messages")
        sides = [self.messages(record, key, option, "assistant") for key, option in keys]
        if shared:
            asked = shared[-1]["content"]
            self.counts["asked_twice"] += bool(asked) and all(side[0]["role"] == "assistant" and
                                                              (side[0]["content"] or "").startswith(asked) for side in sides)
            sides = [joined(shared, side, key) for (key, _), side in zip(keys, sides)]
        for (key, _), side in zip(keys, sides):
            if side[-1]["role"] != "assistant":
                raise Refused(f"\"{key}\" ends with a message of {side[-1]['role']}, but a pair is about the assistant's last; end it there")
        return [self.conversation(record, side, True, True) for side in sides]

    def pair_of_texts(self, record, key, keys):
        _, asked, sides = self.known(known_pair, record) or (None, None, [self.text(record, *key) for key in keys])
        for (side_key, _), side in zip(keys, sides):
            self.given(side_key, side)
        if not key and asked is None:
            self.no_other_prompt(record, sides)
            shared = common_prompt(*sides)
            return [Draft(prompt=side[:shared], response=side[shared:], ends=True) for side in sides]
        if asked is None:
            asked = self.text(record, key, "prompt_key")
            self.counts["asked_twice"] += bool(asked) and all(side.startswith(asked) for side in sides)
            asked = self.formed(asked)
        return [Draft(prompt=asked, response=side, ends=True) for side in sides]

    def no_other_prompt(self, record, sides):
        """Answers without a prompt, and a prompt that nobody asked for beside them?"""
        prompt = record.get("prompt")
        if isinstance(prompt, str) and not sides[0].startswith(prompt):
            raise Refused("\"prompt\" stands beside answers that do not begin with it; give --prompt_key prompt")

    def labelled(self, record):
        o = self.o
        record, _ = self.asked(record)
        label = self.value(record, o.label_key, "label_key")
        liked = {True: 1, "1": 1, False: 0, "0": 0}.get(label) if isinstance(label, (bool, int, float, str)) else None
        if liked is None:
            raise Refused(f"\"{o.label_key}\" is {json.dumps(label)[:40]}, but it must be true or false, 1 or 0")
        if self.template:
            messages = self.messages(record, o.input_key, "input_key", "user")
            whole = isinstance(looked_up(record, o.input_key), list)
            if looked_up(record, o.output_key) is not MISSING or not whole:
                messages = joined(messages, self.messages(record, o.output_key, "output_key", "assistant"), o.output_key)
            return [self.conversation(record, messages, True, True)], liked
        response = self.text(record, o.output_key, "output_key")
        self.given(o.output_key, response)
        prompt = self.formed(self.text(record, o.input_key, "input_key"))
        return [Draft(prompt=prompt, response=response, ends=True)], liked

    def prompts(self, record):
        o = self.o
        record, _ = self.asked(record)
        answer = self.value(record, o.label_key, "label_key") if o.label_key else ""
        answer = json.dumps(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else answer
        if not isinstance(answer, str):
            raise Refused(f"\"{o.label_key}\" is {json.dumps(answer)[:40]}, but the right answer must be text or a number")
        if self.named:
            draft = self.named.draft(self.messages(record, o.input_key, "input_key", "user"), o, "user")
            return [draft], (self.named.text(draft), answer)
        if self.template:
            tools, messages = tools_of(record), self.messages(record, o.input_key, "input_key", "user")
            text = self.template.render(self.template.settled(messages, tools), tools, True) + self.wanted_reward()
            return [Draft(text=text, spans=[])], (text, answer)
        found = self.known(known_prompt, record)
        text = (found[1] if found else self.formed(self.text(record, o.input_key, "input_key"))) + self.wanted_reward()
        return [Draft(prompt=text, response="")], (text, answer)

    def wanted_reward(self):
        """Behind a prompt, of a model that learnt to go by it: conditional SFT."""
        return "" if self.o.csft_prompt is None else self.o.csft_prompt.strip() + " "

    # -- steps: texts in which each placeholder has a label --

    def token(self, text, what):
        """The one token that a text is."""
        ids = next(self.encode(self.folder.fresh, [text])).ids
        if len(ids) != 1:
            raise Refused(f"{what}: {text!r} is {len(ids)} tokens, {ids[:8]}; give a text that is one")
        return ids[0]

    def step_label(self, label, where):
        """Target and share."""
        o = self.o
        if isinstance(label, str):
            if not self.choices:
                return self.token(label, where), 1.0
            if label not in self.choices:
                raise Refused(f"{where} is {json.dumps(label)[:40]}, which is none of --reward_tokens {o.reward_tokens}")
            return self.choices[label], 1.0
        if not isinstance(label, (bool, int, float)):
            raise Refused(f"{where} is {json.dumps(label)[:40]}, but a token or a number is needed")
        if len(self.choices) != 2:
            raise Refused(f"{where} is {json.dumps(label)[:40]}, a soft label (the probability of the first of two tokens), but --reward_tokens names "
                          f"{len(self.choices)}; name two, or give tokens as labels")
        if not 0 <= label <= 1:
            raise Refused(f"{where} is {json.dumps(label)[:40]}, but a soft label must be from 0 to 1")
        return next(iter(self.choices.values())), float(label)

    def steps(self, record):
        key = self.o.label_key
        text, labels = self.text(record, self.o.input_key, "input_key"), self.value(record, key, "label_key")
        if not isinstance(labels, list):
            raise Refused(f"\"{key}\" is {json.dumps(labels)[:40]}, but a list is needed, a label for each step")
        draft = Draft(text=text)
        draft.labels = [self.step_label(label, f"{key}[{k}]") for k, label in enumerate(labels)]
        return [draft], None

    def step_tokens(self, d, ids):
        d.ids, d.mask, d.prompt_tokens = ids, bytearray(i == self.placeholder for i in ids), 0
        steps, text = d.mask.count(1), self.o.placeholder_token
        if ids and not steps:
            raise Refused(f"the text has no placeholder {text!r} as a token of its own, so no step has a label; put it "
                          "after each step, or name another by --placeholder_token")
        if ids and steps != len(d.labels):
            raise Refused(f"{len(d.labels)} labels in \"{self.o.label_key}\" for {steps} placeholders {text!r}; give one for each")

    def step_sections(self, documents):
        targets, shares = array.array("i"), array.array("f")
        for d in documents:
            labels = iter(d.labels)
            for learnt in d.mask:
                target, share = next(labels) if learnt else (IGNORED, 0.0)
                targets.append(target)
                shares.append(share)
        return {TARGETS: little("i", targets), SHARES: little("f", shares)}

    # -- drafts as tokens --

    def encode(self, tokenizer, texts):
        try:
            return iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        except (UnicodeEncodeError, TypeError):  # by version
            raise Refused("a text holds half a character (a lone surrogate such as \\ud800); remove it")

    def tokenize(self, drafts):
        fresh, going_on = [], []
        for d in drafts:
            fresh += d.texts()
            if d.text is None and not d.turns:
                going_on.append(d.response)
        fresh, going_on = self.encode(self.folder.fresh, fresh), self.encode(self.folder.going_on, going_on)
        for d in drafts:
            if d.turns:
                self.turns_tokens(d, fresh)
            elif d.spans is not None:
                self.conversation_tokens(d, next(fresh))
            elif d.labels is not None:
                self.step_tokens(d, next(fresh).ids)
            elif d.text is not None:
                self.plain_tokens(d, next(fresh).ids)
            else:
                self.response_tokens(d, next(fresh).ids, next(going_on).ids)

    def plain_tokens(self, d, ids):
        prefix = [] if self.o.pretrain_blocks else self.folder.prefix
        d.ids = prefix + ids + [self.folder.eos] * d.ends if ids else []
        d.mask, d.prompt_tokens = bytearray(b"\1") * len(d.ids), 0

    def response_tokens(self, d, prompt, response):
        prompt = self.folder.prefix + prompt
        if d.ends:
            response = response + [self.folder.eos] if response else []
            prompt = prompt if response else []
        d.ids, d.prompt_tokens = prompt + response, len(prompt)
        d.mask = bytearray([d.supervised]) * len(prompt) + bytearray(b"\1") * len(response)

    def turns_tokens(self, d, fresh):
        d.ids, d.mask, ends = [], bytearray(), []
        for turn in d.turns:
            ends.append(len(d.ids))
            for side in turn:
                for part in side:
                    d.ids += next(fresh).ids if isinstance(part, str) else [part]
                ends.append(len(d.ids))
        d.turns = [ends[i:i + 3] for i in range(0, len(ends), 3)]
        for begin, middle, *end in d.turns:
            learnt = not d.last or end == ends[-1:]
            d.mask += bytes([d.supervised]) * (middle - begin) + bytes([learnt]) * (sum(end) - middle if end else 0)
        d.prompt_tokens = d.turns[0][1]
        if self.o.pretrain_mode:  # as transformers' collator for plain text
            padding = self.folder.pad if self.folder.pad >= 0 else self.folder.eos
            d.mask = bytearray(i != padding for i in d.ids)

    def conversation_tokens(self, d, encoding):
        d.ids, end = encoding.ids, 0
        d.mask, d.prompt_tokens = bytearray(len(d.ids)), len(d.ids)
        for begin, stop in d.spans:
            first, end = span_tokens(encoding, begin, stop, len(d.ids))
            self.checked(d, first, end, begin, stop)
            self.counts["merged"] += encoding.token_to_chars(first)[0] < begin
            d.mask[first:end] = b"\1" * (end - first)
            d.prompt_tokens = min(d.prompt_tokens, first)
        if d.trims and not d.text[d.spans[-1][1]:].strip():  # a response ends with its stop token, as one that is sampled does
            d.ids, d.mask = d.ids[:end], d.mask[:end]

    def checked(self, d, first, end, begin, stop):
        """What is learnt must read as what the span says."""
        ids, text = d.ids[first:end], d.text[begin:stop]
        if b"".join([self.folder.word[i] for i in ids]) == text.encode() or self.folder.unknown in ids:
            return
        read = b"".join([self.folder.word[i] for i in ids]).decode(errors="replace")
        if canonical(text) not in canonical(read):
            raise Refused(f"the tokens of what the assistant says read {read[:60]!r}, not {text[:60]!r}; the tokenizer's "
                          "offsets cannot be relied on, pip install -U tokenizers")

    def look_at_prompt(self, d):
        """Has a prompt alone, which texts are sampled for, the tokens that it has before an answer? One of a batch is asked."""
        if d.spans and d.spans[0][0]:
            prompt = next(self.encode(self.folder.fresh, [d.text[:d.spans[0][0]]])).ids
            self.counts["apart"] += prompt != d.ids[:d.prompt_tokens]

    # -- what is kept --

    def fits(self, d, response):
        """Cuts a document that is too long, as --truncation says; False: it is left out. response: tokens of the answer, of a pair
        those of the longer one. The rules are those of the trainers (demos/trainer/data/data.h)."""
        if self.blocks():
            return True
        most, how = self.o.max_len, "drop" if self.o.kind == "prompts" else self.o.truncation
        if self.o.pretrain_blocks:  # are cut where a block ends
            return True
        if most and how == "cut_both":
            cut_both(d, response, most)
        elif most and how == "cut" and d.prompt_tokens and d.prompt_tokens >= most - 2:
            return False
        elif most and len(d.ids) > most:
            if how == "drop":
                return False
            d.ids, d.mask = d.ids[:most], d.mask[:most]
            if (d.ends and not self.o.pretrain_eos) or d.spans is not None or d.turns:
                d.ids[-1], d.mask[-1] = self.folder.eos, 1
        return True

    def keep(self, drafts):
        counts, whole = self.counts, sum(len(d.ids) for d in drafts)
        counts["read"] += 1
        if not all(d.ids for d in drafts):
            counts["zero_length"] += 1
            return False
        response = max(len(d.ids) - d.prompt_tokens for d in drafts)
        if not all([self.fits(d, response) for d in drafts]):
            counts["dropped_long"] += 1
            return False
        for d in drafts:
            if d.labels is None:
                d.mask[0] = 0  # nothing stands before it to predict it
            counts["supervised"] += d.mask.count(1)
            counts["fully_masked"] += self.o.kind != "prompts" and not any(d.mask)
            counts["unknown"] += self.folder.unknown is not None and self.folder.unknown in d.ids
        counts["cut"] += sum(len(d.ids) for d in drafts) < whole
        counts["kept"] += 1
        if len(drafts) == 2:
            counts["two_prompts"] += drafts[0].ids[:drafts[0].prompt_tokens] != drafts[1].ids[:drafts[1].prompt_tokens]
            counts["identical"] += drafts[0].ids == drafts[1].ids
        return True

    def batch(self, items):
        """Records of a batch as bytes of sections, and what was counted."""
        self.counts.clear()
        made = []
        for path, number, payload, which in items:
            where = f"{path}:{number}"
            try:
                record = record_of(payload)
                made.append((*self.shape(self.infos[which].converted(record) if self.infos else record), where))
            except Lapsed:
                self.counts.update(read=1, lapsed=1)
            except LeftOut:
                self.counts.update(read=1, ties=1)
            except (Refused, RecursionError, MemoryError) as why:
                raise Refused(f"{where}: {why if isinstance(why, Refused) else reason(why)}") from None
        if made:
            self.tokenize_all(made)
            self.look_at_prompt(made[0][0][0])
        if self.infos and self.o.kind == "sft":
            made = [([part], more, where) for (d,), more, where in made for part in (self.parted(d) if d.text is not None and d.ends
                                                                                      else [d])]
        kept = [(drafts, more) for drafts, more, _ in made if self.keep(drafts)]
        return self.packed(kept), dict(self.counts)

    def tokenize_all(self, made):
        try:
            self.tokenize([d for drafts, _, _ in made for d in drafts])
        except Refused:
            for drafts, _, where in made:  # whose is it?
                try:
                    self.tokenize(drafts)
                except Refused as why:
                    raise Refused(f"{where}: {why}") from None
            raise

    def packed(self, kept):
        documents = [d for drafts, _ in kept for d in drafts]
        out = {IDS: b"".join([little("i", d.ids) for d in documents]),
               MASK: b"".join([d.mask for d in documents]),
               OFFSETS: [len(d.ids) for d in documents]}
        if self.o.kind == "pairs":
            out[MARGINS] = little("d", (more for _, more in kept))
        elif self.o.kind == "labelled":
            out[LABELS] = bytes(more for _, more in kept)
        elif self.o.kind == "prompts":
            for lengths, texts, which in ((PROMPT_OFFSETS, PROMPTS, 0), (ANSWER_OFFSETS, ANSWERS, 1)):
                written = [more[which].encode() for _, more in kept]
                out[texts], out[lengths] = b"".join(written), [len(text) for text in written]
        elif self.o.kind == "steps":
            out.update(self.step_sections(documents))
        return out

    def stream(self, item):
        """A part of a plain text as ids. It is tokenized with what is around it, whose tokens are left out again, so that its
        own are those it has in the whole text; but where a token would reach into another part, it ends there."""
        _, before, text, after = item
        tokenizer = self.folder.going_on if before else self.folder.fresh
        while True:
            encoding = next(self.encode(tokenizer, [before + text + after]))
            begins = [begin for begin, _ in encoding.offsets] + [len(before + text + after)]
            first, end = (bisect.bisect_left(begins, at) for at in (len(before), len(before) + len(text)))
            first = first if before else 0
            if begins[first] > len(before):
                before = ""
            elif begins[end] > len(before) + len(text):
                after = ""
            else:
                return little("i", encoding.ids[first:end])


def response_share(prompt, response, most):
    """Tokens of a response that LLaMA-Factory keeps of a prompt and a response of so many."""
    if 2 * response < most:
        return response
    return min(response, most - prompt if 2 * prompt < most else int(most * (response / (prompt + response))))


def turns_of(d):
    """Where each prompt begins, its response begins, and that ends: of a conversation, one for every turn that is learnt."""
    if d.turns:
        return d.turns
    if d.spans is None:
        return [(0, d.prompt_tokens, len(d.ids))]
    begins = [t for t in range(1, len(d.ids)) if d.mask[t] and not d.mask[t - 1]]
    ends = [next((t for t in range(at, len(d.ids)) if not d.mask[t]), len(d.ids)) for at in begins]
    return list(zip([0, *ends], begins, ends))


def cut_both(d, response, most):
    """Every turn loses the ends of its prompt and its response, until no room is left, as LLaMA-Factory does; the last turn is the
    first to have room where it alone is learnt."""
    if d.prompt_tokens + response <= most:
        return
    kept, room, turns = [], most, turns_of(d)
    for begin, middle, end in reversed(turns) if d.last else turns:
        if room <= 0:
            break
        share = response_share(middle - begin, response if len(turns) == 1 else end - middle, room)
        sides = ((begin, min(middle, begin + max(room - share, 0))), (middle, min(end, middle + share)))
        room -= sum(last - first for first, last in sides)
        kept.append(sides)
    spans = [span for sides in (reversed(kept) if d.last else kept) for span in sides]
    d.ids, d.mask = [i for first, last in spans for i in d.ids[first:last]], b"".join(d.mask[a:b] for a, b in spans)
    d.mask = bytearray(d.mask)


def span_tokens(encoding, begin, end, count):
    """Tokens first .. last + 1 that hold a character of this span."""
    first = next((t for t in map(encoding.char_to_token, range(begin, end)) if t is not None), None)
    if first is None:
        raise Refused(f"the tokenizer makes no token of the characters {begin} to {end} of a conversation, which the assistant "
                      "says; give a tokenizer that drops none")
    last = next(t for t in map(encoding.char_to_token, range(end - 1, begin - 1, -1)) if t is not None)
    while last + 1 < count and encoding.token_to_chars(last + 1)[0] < end:  # a character may be several tokens
        last += 1
    return first, last + 1


TURN = re.compile(r"^(Human|User|Assistant):", re.M)


def in_word(text, at):
    """Is this a character of a word? As a byte of one is in the trainers (demos/trainer/data/pairs.h)."""
    return 0 <= at < len(text) and (text[at] in "_'" or text[at] > "\x7f" or text[at].isalnum())


def common_prompt(one, other):
    """Characters of the prompt that two texts begin with, as the trainers have it (demos/trainer/data/pairs.h): up to the last
    "Assistant:" of both; otherwise up to the first turn that differs, or the first word. A space before it belongs to it."""
    n = len(os.path.commonprefix([one, other]))
    last = [max((m.end() for m in TURN.finditer(text) if m[1] == "Assistant"), default=-1) for text in (one, other)]
    if last[0] == last[1] and 0 <= last[0] <= n:
        return last[0]
    turn = next((m for m in reversed(list(TURN.finditer(one[:n])))), None)
    if turn:
        return turn.end() if turn[1] == "Assistant" else turn.start()
    if n in (len(one), len(other)) and n:
        n -= 1
    while n and in_word(one, n - 1) and (in_word(one, n) or in_word(other, n)):
        n -= 1
    return n - 1 if n and one[n - 1] == " " else n


def once(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in collections.Counter(key for key, _ in pairs).items() if n > 1)
        raise Refused(f"key \"{twice}\" occurs twice; remove one of them")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=once)


def json_of(raw, wanted):
    try:
        return DECODER.decode(raw.decode())
    except UnicodeDecodeError as why:
        raise Refused(f"byte {why.start} is not UTF-8; convert the file to UTF-8")
    except ValueError as why:
        raise Refused(f"broken JSON ({why}); {wanted} is needed")
    except RecursionError:
        raise Refused("broken JSON (lists or objects lie too deep in each other); remove it")


def record_of(payload):
    if isinstance(payload, bytes):
        payload = json_of(payload, "one whole object {...} per line")
    if not isinstance(payload, dict):
        raise Refused(f"the record is {json.dumps(payload)[:40]}, but an object {{...}} is needed")
    return payload


def little(code, values):
    numbers = array.array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


# ---- data sets --------------------------------------------------------------------------------------------------------------


DATA = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def json_items(path):
    """Lines, or a list of records, whatever the file is called."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        mark = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
        file.seek(mark)
        listed = re.match(rb"\s*\[\s*[{\]]", file.read(4096))
        file.seek(mark)
        if not listed:
            yield from ((path, i + 1, line) for i, line in enumerate(file) if line.strip())
            return
        try:
            records = json_of(file.read(), "a list of objects, or one object per line")
        except Refused as why:
            raise Refused(f"{path}: {why}") from None
        yield from ((path, i + 1, record) for i, record in enumerate(records))


def parquet_items(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused(f"{path}: .parquet is read by pyarrow, which is not here; pip install pyarrow")
    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096):
        for record in batch.to_pylist():
            number += 1
            yield path, number, record


def file_items(path):
    if not os.path.isfile(path):
        raise Refused(f"{path} is no file; give a .jsonl, .json, .jsonl.gz, .parquet or .txt, a folder, or json@FOLDER")
    items = parquet_items(path) if path.endswith(".parquet") else json_items(path)
    if not path.endswith(DATA):
        raise Refused(f"{path} ends in neither .jsonl, .json, .jsonl.gz, .parquet nor .txt; only these are read")
    try:
        yield from items
    except (EOFError, zlib.error, gzip.BadGzipFile) as why:
        raise Refused(f"{path} is no whole gzip file ({why}); take it anew from where it is from")
    except OSError as why:
        raise Refused(f"{path} cannot be read: {why.strerror}; look at its permissions")


def folder_files(folder, split):
    """train.jsonl, train-00000-of-00002.parquet, train/*.jsonl and so on; a folder that names no split is all train."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(DATA))
    inside = os.path.join(folder, split)
    found = [name for name in names if re.match(rf"{split}[^a-zA-Z]", name)]
    if os.path.isdir(inside):
        found += [os.path.join(split, name) for name in sorted(os.listdir(inside)) if name.endswith(DATA)]
    if not found and split == "train" and not any(re.match(r"(test|valid|dev|eval)", name) for name in os.listdir(folder)):
        found = names
    if not found:
        raise Refused(f"{folder} has no data of --split {split} ({split}.jsonl, {split}-*.parquet, {split}/*.jsonl ...); it has "
                      f"{', '.join(sorted(os.listdir(folder))[:8]) or 'nothing'}")
    return [os.path.join(folder, name) for name in found]


def set_files(name, split):
    kind, at, folder = name.partition("@")
    if at and kind not in ("json", "parquet"):
        raise Refused(f"--dataset {name}: {kind}@ is not known; json@FOLDER and parquet@FOLDER are")
    path = folder if at else name
    return folder_files(path, split) if os.path.isdir(path) else [path]


def sampled(sets, weights, seed):
    """Every record from a set drawn by the weights, until one that is drawn has no further: nothing is read twice."""
    draw, ends = random.Random(seed), list(itertools.accumulate(weights))
    for records in iter(lambda: sets[bisect.bisect_right(ends, draw.random() * ends[-1])], None):
        try:
            yield next(records)
        except StopIteration:
            return


def in_shares(sets, limit):
    """One set after the other; of each the same share, from its beginning, where the limit is below their sum."""
    there = [sum(1 for path in files for _ in file_items(path)) for files in sets]
    ends = [0, *itertools.accumulate(there)]
    limit = min(limit, ends[-1])
    for which, (files, begin, end) in enumerate(zip(sets, ends, ends[1:])):
        share = limit * end // ends[-1] - limit * begin // ends[-1]
        yield from itertools.islice(set_items(files, which), share)


def data_files(o):
    return [set_files(name, o.split) for name in o.dataset.split(",")]


def set_items(files, which):
    """Records, each with the number of its set."""
    return ((*item, which) for path in files for item in file_items(path))


def data_items(o):
    most = [info.most for info in infos_of(o)] if o.dataset_info else itertools.repeat(None)
    sets = [itertools.islice(set_items(files, which), limit) for which, (files, limit) in enumerate(zip(data_files(o), most))]
    if o.dataset_probs is not None and len(o.dataset_probs) != len(sets):
        raise Refused(f"--dataset_probs has {len(o.dataset_probs)} weights for {len(sets)} data sets; give one for each")
    if o.dataset_probs is None and len(sets) > 1 and o.max_samples < ALL_SAMPLES:
        return in_shares(data_files(o), o.max_samples)
    items = sampled(sets, o.dataset_probs, o.seed) if o.dataset_probs else itertools.chain.from_iterable(sets)
    return itertools.islice(items, o.max_samples)


def line_begin(text):
    """Where the last line begins that begins with no space, so that a token ends before it; 0: nowhere."""
    at = text.rfind("\n")
    while at >= 0 and (at + 1 == len(text) or text[at + 1].isspace()):
        at = text.rfind("\n", 0, at)
    return at + 1


def stream_items(files):
    """Parts of plain text, cut where a line begins, each with some of the text around it."""
    for path in files:
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                context, text = "", ""
                while part := file.read(STREAM):
                    text += part
                    if at := line_begin(text):
                        yield path, context, text[:at], text[at:at + AROUND]
                        context, text = text[text.rfind("\n", 0, max(at - AROUND, 0)) + 1:at], text[at:]
                if text:
                    yield path, context, text, ""
        except OSError as why:
            raise Refused(f"{path} cannot be read: {why.strerror}; give a .txt of UTF-8")
        except UnicodeDecodeError as why:
            raise Refused(f"{path}: byte {why.start} of a part is not UTF-8 ({why.reason}); convert the file to UTF-8")


# ---- the file ---------------------------------------------------------------------------------------------------------------


class Section:
    """Bytes that grow beside the file until all are there."""

    def __init__(self, folder):
        self.file, self.size, self.crc = tempfile.TemporaryFile(dir=folder), 0, 0

    def add(self, data):
        self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)


class Offsets:
    """Lengths as offsets from 0."""

    def __init__(self):
        self.at, self.values = 0, array.array("Q", [0])

    def add(self, lengths):
        for length in lengths:
            self.at += length
            self.values.append(self.at)


class TokenFile:
    def __init__(self, path):
        self.path, self.folder = path, os.path.dirname(os.path.abspath(path))
        self.sections = {}

    def add(self, made):
        for name, data in made.items():
            if name not in self.sections:
                self.sections[name] = Offsets() if isinstance(data, list) else Section(self.folder)
            self.sections[name].add(data)

    def write(self, kind, folder, about):
        offsets = self.sections[OFFSETS]
        documents, tokens = len(offsets.values) - 1, offsets.at
        self.add({STOPS: little("i", folder.stops), WORD_OFFSETS: [len(word) for word in folder.word],
                  WORDS: b"".join(folder.word), WORD_FLAGS: bytes(folder.flags),
                  ABOUT: json.dumps(about, ensure_ascii=False, sort_keys=True).encode()})
        for name, section in self.sections.items():
            if isinstance(section, Offsets):
                self.sections[name] = Section(self.folder)
                self.sections[name].add(little("Q", section.values))
        table, at = b"", HEADER + ENTRY * len(self.sections)
        for name, section in sorted(self.sections.items()):
            at = -(-at // ALIGNED) * ALIGNED
            table += struct.pack("<IIQQQ", name, section.crc, at, section.size, 0)
            at += section.size
        head = struct.pack("<QIIiiiiQQQII", at, KINDS[kind], len(self.sections), folder.bos, folder.eos, folder.pad, folder.vocab,
                           documents, tokens, folder.size, folder.crc, 0).ljust(HEADER - 16, b"\0")
        self.replace(MAGIC + struct.pack("<II", VERSION, zlib.crc32(head + table)) + head + table)

    def replace(self, head):
        temporary = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(head)
                for _, section in sorted(self.sections.items()):
                    file.write(bytes(-file.tell() % ALIGNED))
                    section.file.seek(0)
                    while part := section.file.read(1 << 20):
                        file.write(part)
            os.replace(temporary, self.path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


# ---- processes --------------------------------------------------------------------------------------------------------------

_maker = None


def end_with_parent(parent):
    """Even if that is killed; where the system can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def worker_begin(options, now, parent):
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says what happened
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = Maker(options, now)


def worker_batch(items):
    return _maker.batch(items)


def worker_stream(item):
    return _maker.stream(item)


def batches(items):
    while batch := list(itertools.islice(items, BATCH)):
        yield batch


def in_order(o, now, maker, work, parts):
    """work(part) of every part, in their order, whoever did it."""
    if o.workers == 1:
        global _maker
        _maker = maker
        yield from map(work, parts)
        return
    with concurrent.futures.ProcessPoolExecutor(o.workers, initializer=worker_begin, initargs=(o, now, os.getpid())) as pool:
        waiting = collections.deque()
        try:
            for part in parts:
                waiting.append(pool.submit(work, part))
                if len(waiting) >= 4 * o.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise Refused(f"one of the {o.workers} processes was ended from outside, for want of memory perhaps; lower --workers")
        finally:
            for future in waiting:
                future.cancel()


class Progress:
    """A line on stderr, drawn anew where that is a terminal."""

    def __init__(self):
        self.began = self.drawn = time.monotonic()
        self.there = sys.stderr.isatty()

    def step(self, counts, tokens):
        now = time.monotonic()
        if not self.there or now - self.drawn < 0.2:
            return
        self.drawn = now
        rate = tokens / (now - self.began)
        print(f"\r{counts['read']:,} records, {tokens:,} tokens, {rate:,.0f} tokens/s \033[K", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.there:
            print("\r\033[K", end="", file=sys.stderr)
        return time.monotonic() - self.began


def make_records(o, now, maker, file, counts, progress):
    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        file.add(made)
        counts.update(counted)
        progress.step(counts, file.sections[OFFSETS].at)


def make_blocks(o, now, maker, file, counts, progress):
    """Texts, each with its EOS, side by side in documents of max_len tokens, which begin with BOS in the place of their first token
    where the tokenizer puts one before a text. What fills no document is left out."""
    left, begin = array.array("i"), maker.folder.prefix[:1] if maker.folder.bos in maker.folder.prefix[:1] else []
    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        left.frombytes(made[IDS])
        counts.update({name: n for name, n in counted.items() if name not in ("kept", "supervised", "fully_masked")})
        whole = len(left) // o.max_len * o.max_len
        for at in range(0, whole, o.max_len):
            ids = array.array("i", begin) + left[at + len(begin):at + o.max_len]
            file.add({IDS: ids.tobytes(), MASK: b"\0" + b"\1" * (o.max_len - 1), OFFSETS: [o.max_len]})
            counts.update(kept=1, supervised=o.max_len - 1)
        left = left[whole:]
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)


def make_groups(o, now, maker, file, counts, progress):
    """Plain texts one after the other, in documents of max_len tokens. As in LLaMA-Factory what is left of every 1,000 texts is
    left out, and each document begins with BOS in the place of a token, where the tokenizer puts one before a text."""
    texts, pad = collections.deque(), maker.folder.pad if maker.folder.pad >= 0 else maker.folder.eos
    begins = maker.folder.config.get("add_bos_token", "Llama" in str(maker.folder.config.get("tokenizer_class")))
    first = maker.folder.bos if begins and maker.folder.bos >= 0 else None

    def flush(count):
        ids = array.array("i", itertools.chain.from_iterable(texts.popleft() for _ in range(count)))
        for at in range(0, len(ids) - o.max_len + 1, o.max_len):
            block = ids[at:at + o.max_len]
            if first is not None:
                block[0] = first
            mask = bytearray(i != pad for i in block)
            mask[0] = 0
            file.add({IDS: little("i", block), MASK: bytes(mask), OFFSETS: [len(block)]})
            counts.update(kept=1, supervised=mask.count(1), fully_masked=int(not any(mask)))

    for made, counted in in_order(o, now, maker, worker_batch, batches(iter(data_items(o)))):
        counts.update(read=counted["read"])
        ids, at = array.array("i", made[IDS]), 0
        for length in made[OFFSETS]:
            texts.append(ids[at:at + length])
            at += length
        while len(texts) >= GROUP:
            flush(GROUP)
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)
    flush(len(texts))


def make_stream(o, now, maker, file, counts, progress):
    """Plain text as documents of max_len tokens, every token of them learnt."""
    left = array.array("i")
    files = list(itertools.chain.from_iterable(data_files(o)))
    for part in itertools.chain(in_order(o, now, maker, worker_stream, stream_items(files)), [None]):
        left.frombytes(part or b"")
        whole = len(left) if part is None else len(left) // o.max_len * o.max_len
        for at in range(0, whole, o.max_len):
            if counts["kept"] >= o.max_samples:
                return
            ids = left[at:min(at + o.max_len, whole)]
            mask = b"\0" + b"\1" * (len(ids) - 1)
            file.add({IDS: ids.tobytes(), MASK: mask, OFFSETS: [len(ids)]})
            counts.update(read=1, kept=1, supervised=len(ids) - 1, fully_masked=int(len(ids) == 1))
        left = left[whole:]
        progress.step(counts, file.sections[OFFSETS].at if file.sections else 0)


# ---- from the command line --------------------------------------------------------------------------------------------------


def weights(text):
    found = [float(one) for one in text.split(",")]
    if not all(math.isfinite(one) and one >= 0 for one in found) or not sum(found) > 0:
        raise ValueError
    return found


def whole(low):
    def number(text):
        if int(text) < low:
            raise ValueError
        return int(text)
    number.__name__ = f"whole number from {low} on"
    return number


def options_of(arguments):
    p = argparse.ArgumentParser(prog="prepare.py", description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pretrain", required=True, metavar="FOLDER", help="the model's folder, with tokenizer.json")
    p.add_argument("--dataset", required=True, metavar="DATA",
                   help="a comma list of .jsonl, .json (both also .gz), .parquet or (with --pretrain_mode) .txt, folders, or "
                        "json@FOLDER")
    p.add_argument("--output", required=True, metavar="FILE", help="the token file that is written")
    p.add_argument("--kind", choices=KINDS, default="sft",
                   help="sft (train_sft, train_kd, --pretrain_data), pairs (train_dpo, train_rm), labelled (train_kto), prompts "
                        "(train_ppo, generate), steps (train_prm)")
    p.add_argument("--input_key", help="key of the prompt, of all text, or of a list of messages (input); a.b is b inside a")
    p.add_argument("--output_key", help="key of the response; sft without it: the input is all there is; labelled: output")
    p.add_argument("--prompt_key", help="pairs: key of the prompt; without it chosen and rejected begin with it")
    p.add_argument("--chosen_key", default="chosen", help="pairs: key of the better response")
    p.add_argument("--rejected_key", default="rejected", help="pairs: key of the worse response")
    p.add_argument("--margin_key", default="margin", help="pairs: key of the margin, where records have one")
    p.add_argument("--label_key", help="labelled: key of true or false (label); steps: of the list of labels (label); prompts: key of "
                                       "the right answer")
    p.add_argument("--placeholder_token", metavar="TOKEN", help="steps: what stands behind each of them, and is labelled")
    p.add_argument("--reward_tokens", metavar="TOKENS", nargs="+",
                   help="steps: the tokens that labels are among; without it, all; numbers as labels need two")
    p.add_argument("--apply_chat_template", action="store_true",
                   help="texts and lists of messages are written by the chat template")
    p.add_argument("--tokenizer_chat_template", metavar="TEXT_OR_FILE", help="that template, in the place of the folder's")
    p.add_argument("--template", choices=sorted(TEMPLATES), metavar="NAME",
                   help="conversations as LLaMA-Factory 0.9.5 writes them by this name, in the place of a chat template: "
                        f"{', '.join(sorted(TEMPLATES))}")
    p.add_argument("--default_system", help="the system's text where a record has none, in the place of the template's own")
    p.add_argument("--dataset_info", metavar="JSON",
                   help="a list with an object for each data set, as in LLaMA-Factory's dataset_info.json: formatting, columns, tags; "
                        "also max_samples, and blocks: true for plain text in documents of --max_len tokens (seqpar writes it)")
    p.add_argument("--input_template", help="template of the prompt, which replaces {}, without a chat template (User: {}\\nAssistant: )")
    p.add_argument("--csft_prompt", metavar="TEXT", help="text that asks for a reward, appended to each prompt with a space")
    p.add_argument("--train_on", choices=("assistant", "last", "all"), default="assistant",
                   help="sft: all turns of the assistant are learnt, its last one, or every token (assistant)")
    p.add_argument("--pretrain_mode", action="store_true", help="sft: every token of the input is learnt, and no EOS is added")
    p.add_argument("--pretrain_eos", action="store_true",
                   help="with --pretrain_mode: EOS ends each text, unless it is cut, as in LLaMA-Factory's stage pt")
    p.add_argument("--pretrain_blocks", action="store_true",
                   help="with --pretrain_eos: texts follow each other in documents of --max_len tokens, as in that stage with packing; "
                        "the last tokens are left out")
    p.add_argument("--max_len", type=whole(0), default=1024, help="longest document or prompt, in tokens; 0: no limit (1024)")
    p.add_argument("--truncation", choices=("drop", "cut", "cut_both"),
                   help="what happens to longer ones: they are left out, lose their end as in OpenRLHF, or the ends of prompt and "
                        "response as in LLaMA-Factory (cut; prompts: drop)")
    p.add_argument("--max_samples", type=whole(1), default=ALL_SAMPLES, help="use at most this many records, after mixing")
    p.add_argument("--split", choices=("train", "test"), default="train", help="which files of a folder are read (train)")
    p.add_argument("--dataset_probs", type=weights,
                   help="a weight for each data set: every record is drawn from one of them, in its order, until one that is drawn "
                        "is exhausted; without it they are read one after the other, of each the same share where --max_samples are "
                        "fewer than there are")
    p.add_argument("--seed", type=whole(0), default=42, help="of --dataset_probs (42)")
    p.add_argument("--workers", type=whole(1), default=os.cpu_count() or 1, help="processes; the file does not depend on them")
    p.add_argument("--overwrite", action="store_true", help="replace a token file that is there")
    return p.parse_args(arguments)


def settle(o):
    """What does not go together, before anything is read; and defaults that hang on others."""
    texts = [path for files in data_files(o) for path in files if path.endswith(".txt")]
    o.plain = bool(texts)
    if o.apply_chat_template and (o.input_template is not None or o.pretrain_mode):
        other = "--pretrain_mode" if o.pretrain_mode else "--input_template"
        raise Refused(f"--apply_chat_template and {other} are two ways to shape a text; leave out one of them")
    if o.template and (o.apply_chat_template or o.input_template is not None):
        other = "--apply_chat_template" if o.apply_chat_template else "--input_template"
        raise Refused(f"--template {o.template} and {other} are two ways to shape a text; leave out one of them")
    if o.default_system is not None and not o.template:
        raise Refused("--default_system is written by --template; add it")
    if o.tokenizer_chat_template is not None and not o.apply_chat_template:
        raise Refused("--tokenizer_chat_template is used by --apply_chat_template; add it")
    if o.pretrain_mode and o.output_key is not None:
        raise Refused(f"--pretrain_mode trains on the text of --input_key only; leave out --output_key {o.output_key}")
    if o.pretrain_eos > o.pretrain_mode or o.pretrain_blocks > o.pretrain_eos:
        wanted, given = ("mode", "eos") if o.pretrain_eos > o.pretrain_mode else ("eos", "blocks")
        raise Refused(f"--pretrain_{given} needs --pretrain_{wanted}; add it, or leave it out")
    if o.pretrain_blocks and o.max_len < 2:
        raise Refused("--pretrain_blocks makes documents of --max_len tokens; give 2 or more")
    if o.pretrain_eos and o.plain:
        raise Refused(f"{texts[0]} is read as one text, but LLaMA-Factory's stage pt ends every line in EOS; give a .jsonl "
                      "with one text in each record, or leave out --pretrain_eos")
    if o.kind == "prompts" and o.output_key is not None:
        raise Refused(f"prompts have no responses; leave out --output_key {o.output_key} (--label_key is what a reward rule compares with)")
    if o.kind != "sft" and (o.pretrain_mode or o.train_on != "assistant"):
        raise Refused(f"{'--pretrain_mode' if o.pretrain_mode else '--train_on'} is for --kind sft, not for {o.kind}; leave it out")
    if o.csft_prompt is not None and (o.kind != "prompts" or o.template):
        raise Refused(f"--csft_prompt stands behind {'the text of a prompt, and --template writes tokens' if o.template else 'prompts'}; "
                      f"leave it out, or {'take --apply_chat_template' if o.template else 'give --kind prompts'}")
    settle_steps(o)
    if o.kind == "prompts" and o.truncation in ("cut", "cut_both"):
        raise Refused(f"a prompt that is cut asks something else; leave out --truncation {o.truncation}, longer ones are left out")
    o.truncation = o.truncation or ("drop" if o.kind == "prompts" else "cut")
    if o.plain and (not o.pretrain_mode or len(texts) < sum(map(len, data_files(o))) or o.dataset_probs or o.max_len < 2):
        raise Refused(f"{texts[0]} is plain text, cut into documents of --max_len tokens; it needs --pretrain_mode, other .txt "
                      "files alone beside it, no --dataset_probs, and a --max_len of 2 or more")
    if o.dataset_info is not None:
        settle_info(o)
        o.pretrain_eos = o.pretrain_blocks = False  # it says both
    o.alpaca = o.input_key is None and not o.pretrain_mode and o.dataset_info is None
    named = (o.prompt_key, o.chosen_key, o.rejected_key) != (None, "chosen", "rejected") if o.kind == "pairs" else not o.alpaca
    o.by_form = not (named or o.dataset_info is not None or o.apply_chat_template or o.output_key or o.kind == "labelled")
    o.form_of_sets = o.input_template or FORM_OF_SETS
    o.input_key = o.input_key or "input"
    o.input_template = "User: {}\nAssistant: " if o.input_template is None else o.input_template
    if "{}" not in o.input_template:
        raise Refused(f"--input_template must have {{}} once, in the place of the prompt, but has none: {o.input_template!r}")
    if o.input_template.count("{}") > 1:
        raise Refused(f"--input_template must have {{}} once, in the place of the prompt, but has it twice: {o.input_template!r}")
    if o.kind == "labelled":
        o.output_key, o.label_key = o.output_key or "output", o.label_key or "label"
    place_is_free(o)


def settle_steps(o):
    if o.kind != "steps":
        given = "placeholder_token" if o.placeholder_token is not None else "reward_tokens" if o.reward_tokens else None
        if given:
            raise Refused(f"--{given} is for --kind steps, not for {o.kind}; leave it out")
        return
    for name in ("apply_chat_template", "template", "dataset_info", "input_template", "output_key"):
        if getattr(o, name):
            raise Refused(f"--{name} shapes prompts and responses, but steps have one text, which is taken as it is; leave it out")
    if not o.placeholder_token:
        raise Refused("no placeholder token; give the token after each step by --placeholder_token")
    if o.truncation == "cut_both":
        raise Refused("--truncation cut_both needs a prompt and a response, but train_prm has a single text; give cut or drop")
    o.reward_tokens = " ".join(o.reward_tokens or []).split()
    if o.reward_tokens and not 2 <= len(o.reward_tokens) <= MOST_CHOICES:
        raise Refused(f"--reward_tokens {' '.join(o.reward_tokens)} are {len(o.reward_tokens)}; give 2 to {MOST_CHOICES}")
    o.reward_tokens = " ".join(o.reward_tokens)
    o.input_key, o.label_key = o.input_key or "input", o.label_key or "label"


def settle_info(o):
    """The keys that Info gives its records."""
    given = next((name for name in ("input_key", "output_key", "prompt_key", "label_key") if getattr(o, name) is not None), None)
    if given:
        raise Refused(f"--dataset_info and --{given} both name keys; leave out one of them")
    completes = all(info.format == "completion" for info in infos_of(o))
    if not (completes or o.template or o.apply_chat_template or o.pretrain_mode):
        raise Refused("--dataset_info gives conversations, which --template or --apply_chat_template writes; add one of them")
    o.input_key = "messages"
    o.label_key = "label" if o.kind == "labelled" else None


def replaceable(path):
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


def place_is_free(o):
    inputs = [path for files in data_files(o) for path in files]
    if os.path.exists(o.output) and any(os.path.exists(path) and os.path.samefile(path, o.output) for path in inputs):
        raise Refused(f"--output {o.output} is read as data; give another name")
    if os.path.exists(o.output) and not os.path.isfile(o.output):
        raise Refused(f"--output {o.output} is there and no regular file; give another name")
    if os.path.exists(o.output) and not o.overwrite:
        raise Refused(f"--output {o.output} is there already; add --overwrite or give another name")
    if os.path.exists(o.output) and not replaceable(o.output):
        raise Refused(f"--output {o.output} is there and no token file, which alone is replaced; give another name")
    if not os.path.isdir(os.path.dirname(os.path.abspath(o.output))):
        raise Refused(f"--output {o.output} is to be in a folder that is not there; make it, or give another name")


def summary(counts, tokens, kind):
    what = "pairs" if kind == "pairs" else "records"
    text = (f"{counts['read']} {what} read, {counts['kept']} kept with {tokens} tokens, {counts['supervised']} of them supervised; "
            f"{counts['dropped_long']} too long, {counts['zero_length']} empty, {counts['cut']} cut, {counts['fully_masked']} "
            "fully masked")
    return text + (f", {counts['identical']} identical, {counts['two_prompts']} with two prompts" if kind == "pairs" else "")


def notices(o, maker, counts):
    yield from maker.folder.notices()
    if counts["lapsed"]:
        yield (f"in {counts['lapsed']} records user and assistant do not speak by turns, or too few or too many times; they are left "
               "out, as LLaMA-Factory does")
    if counts["merged"] or counts["apart"]:
        yield (f"in {counts['merged']} places a prompt's last characters and the answer's first are one token, and "
               f"{counts['apart']} of {-(-counts['read'] // BATCH)} prompts that were looked at have other tokens alone, as texts "
               "are sampled for them; a template that ends prompts in a special token, or a line, has none of this")
    for key in counts:
        if key.startswith("set ") and counts[key]:
            yield (f"{counts[key]} records were read as {key[4:]}, as OpenRLHF 0.2 read that set"
                   f"{'' if 'rlhf' in key else f', with prompts in the form {o.form_of_sets!r}'}; options that name keys say otherwise")
    if counts["ties"]:
        yield f"{counts['ties']} pairs are ties and were left out (OpenRLHF 0.2 took the second answer for the better one)"
    if counts["asked_twice"] * 2 > counts["read"]:
        yield (f"in {counts['asked_twice']} of {counts['read']} pairs both responses begin with the prompt; if that is their "
               "prompt, leave out --prompt_key")
    if counts["unknown"]:
        yield f"{counts['unknown']} documents hold characters that the tokenizer does not know"
    if o.apply_chat_template and not o.template and o.kind != "prompts" and o.train_on != "all" and not maker.template.stops_turns():
        yield (f"the chat template ends what the assistant says in none of {', '.join(maker.template.stops)}, where sampling "
               "stops; name its token in generation_config.json's eos_token_id, or nothing learns to stop")


NOT_SHOWN = ("workers", "output", "overwrite", "plain", "alpaca", "by_form", "form_of_sets")  # what the documents do not hang on, or what follows


def about(o, counts, summed):
    shown = {key: value for key, value in vars(o).items() if key not in NOT_SHOWN}
    return {"options": shown, "counts": dict(counts), "summary": summed}


def prepare(arguments):
    o = options_of(arguments)
    settle(o)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    now = datetime.datetime.now().replace(minute=0, second=0, microsecond=0)  # the same in all processes
    maker, file, counts, progress = Maker(o, now), TokenFile(o.output), collections.Counter(), Progress()
    try:
        make = make_stream if o.plain else make_groups if maker.blocks() else make_blocks if o.pretrain_blocks else make_records
        make(o, now, maker, file, counts, progress)
    finally:
        seconds = progress.end()
    tokens = file.sections[OFFSETS].at if file.sections else 0
    said = summary(counts, tokens, o.kind)
    if not counts["kept"]:
        raise Refused(f"{o.dataset}: nothing is left ({said}); raise --max_len, or look at the data")
    if o.kind != "prompts" and not counts["supervised"]:
        raise Refused(f"{o.dataset}: no supervised token in the whole set ({said}); raise --max_len, or look at the data")
    if o.kind == "steps":
        file.add({CHOICES: little("i", maker.choices.values())})
    file.write(o.kind, maker.folder, about(o, counts, said))
    for notice in notices(o, maker, counts):
        print(f"notice: {shown(notice)}", file=sys.stderr)
    print(f"{o.output}: {o.kind}, {said}; {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def half_the_memory():
    """The most that one process may take: a template that doubles a text gets a sentence, and the machine stays alive."""
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (half if limit == resource.RLIM_INFINITY else min(half, limit), hard))


def main():
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that temporary files go
    half_the_memory()
    try:
        prepare(None)
    except Refused as why:
        print(f"error: {shown(why)}", file=sys.stderr)
        sys.exit(2)
    except ImportError as why:
        print(f"error: {shown(why)}; pip install tokenizers jinja2", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("error: there is no memory left; give the data as one object per line, or lower --workers", file=sys.stderr)
        sys.exit(1)
    except OSError as why:
        print(f"error: {shown(why.filename or 'the output')}: {why.strerror}; nothing was written", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
