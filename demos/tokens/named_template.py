# SPDX-License-Identifier: MIT OR Unlicense
"""Conversations as LLaMA-Factory writes them by the name of a template.

What is asked and what is said are pieces that are tokenized apart, as there: no token reaches
from one into the next.
"""
from .base import Refused
from .drafts import Draft
from .messages import called

BOS, EOS = "bos", "eos"
CHATML = {"system": ["<|im_start|>system\n{}<|im_end|>\n"],
          "user": ["<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"],
          "assistant": ["{}<|im_end|>\n"], "ends": "<|im_end|>"}
LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
# What LLaMA-Factory 0.9.5 makes of each message, in pieces that it tokenizes apart; (BOS,) and
# (EOS,) are these tokens. ends: the tokenizer's EOS from then on. inside: the system's text
# stands in the first user's message. verify/second/golden_templates.json has its own
# renderings.
TEMPLATES = {
    "chatml": CHATML,
    "llama3": {"begin": [(BOS,)], "system": [LLAMA3.format("system") + "{}<|eot_id|>"],
               "user": [LLAMA3.format("user") + "{}<|eot_id|>" + LLAMA3.format("assistant")],
               "assistant": ["{}<|eot_id|>"], "ends": "<|eot_id|>",
               "text_ends": "<|end_of_text|>"},
    "mistral": {"begin": [(BOS,)], "system": ["{}\n\n"], "inside": True,
                "user": ["[INST] {}[/INST]"], "assistant": [" {}", (EOS,)]},
    "qwen": {**CHATML, "default": "You are Qwen, created by Alibaba Cloud. You are a helpful "
                                  "assistant."},
    "zephyr": {"system": ["<|system|>\n{}", (EOS,)],
               "user": ["<|user|>\n{}", (EOS,), "<|assistant|>\n"],
               "assistant": ["{}", (EOS,)], "default": "You are Zephyr, a helpful assistant."}}


class NamedTemplate:
    """Conversations as pairs of what is asked and what is said, each a list of texts and
    ids."""

    def __init__(self, name, folder, system):
        self.form, self.name, self.folder = TEMPLATES[name], name, folder
        self.default = self.form.get("default", "") if system is None else system
        if "ends" in self.form:
            folder.end_with(self.form["ends"], f"--template {name}")
        self.tokens = {BOS: [folder.bos] * (folder.bos >= 0), EOS: [folder.eos]}

    def piece(self, role, content):
        made = []
        for part in self.form[role]:
            token = isinstance(part, tuple)
            made += self.tokens[part[0]] if token else [part.replace("{}", content, 1)]
        return [part for part in made if part != ""]

    def checked(self, messages, ends):
        first = messages[0]["role"] == "system"
        for i, message in enumerate(messages[first:]):
            out_of_turn = message["role"] != ("user", "assistant")[i % 2]
            if out_of_turn or called(message) or message["content"] is None:
                calls = " and calls a function" * bool(called(message))
                raise Refused(f"message {first + i + 1} is of {message['role']}{calls}, but "
                              f"--template {self.name} writes texts of user and assistant by "
                              "turns; calls are written by --apply_chat_template, or remove "
                              "the record")
        if messages[-1]["role"] != ends:
            raise Refused(f"the last of {len(messages)} messages is of {messages[-1]['role']}, "
                          f"but that of the {ends} is needed; end the conversation there")
        return (messages[0]["content"] if first else "") or self.default, messages[first:]

    def pairs(self, messages, ends="assistant"):
        system, messages = self.checked(messages, ends)
        sides = []
        for i, message in enumerate(messages):
            side, content = [], message["content"]
            if i == 0:
                side += [part for begin in self.form.get("begin", [])
                         for part in self.tokens[begin[0]]]
                if system and self.form.get("inside"):
                    content = self.form["system"][0].replace("{}", system, 1) + content
                elif system:
                    side += self.piece("system", system)
            sides.append(side + self.piece(message["role"], content))
        return [tuple(sides[i:i + 2]) for i in range(0, len(sides), 2)]

    def draft(self, messages, o, ends="assistant"):
        turns = self.pairs(messages, ends)
        if o.kind != "sft" and len(turns) > 1:
            # only the last answer is learnt: what was said before is its prompt
            before = [part for turn in turns[:-1] for side in turn for part in side]
            turns = [(before + turns[-1][0], *turns[-1][1:])]
        return Draft(turns=turns, supervised=o.train_on == "all", last=o.train_on == "last")

    def text(self, draft):
        """As a person reads it."""
        parts = [part for turn in draft.turns for side in turn for part in side]
        words = self.folder.word
        return "".join(part if isinstance(part, str) else words[part].decode(errors="replace")
                       for part in parts)
