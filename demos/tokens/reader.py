# SPDX-License-Identifier: MIT OR Unlicense
"""Records as drafts: what a record says becomes documents that wait for the tokenizer.

There is a method for each kind of token file: sft, pairs, labelled, prompts and steps. It gives
the drafts of a record, two for a pair, and what belongs to them: margin, label, answer.
"""
import json
import math
import os
import re
from .base import Refused
from .drafts import Draft
from .encoder import Encoder
from .known_sets import known_pair, known_prompt, orca
from .messages import MISSING, alpaca_before, joined, looked_up, message_of, tools_of

TURN = re.compile(r"^(Human|User|Assistant):", re.M)


def in_word(text, at):
    """Is this a character of a word? As a byte of one is in the trainers
    (demos/trainer/data/pairs.h)."""
    return 0 <= at < len(text) and (text[at] in "_'" or text[at] > "\x7f" or text[at].isalnum())


def common_prompt(one, other):
    """Characters of the prompt that two texts begin with, as the trainers have it
    (demos/trainer/data/pairs.h): up to the last "Assistant:" of both; otherwise up to the first
    turn that differs, or the first word. A space before it belongs to it."""
    n = len(os.path.commonprefix([one, other]))
    last = [max((m.end() for m in TURN.finditer(text) if m[1] == "Assistant"), default=-1)
            for text in (one, other)]
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


class Reader(Encoder):
    """Turns records into drafts. A Maker, which is one, has template, named, infos, choices."""

    # -- what a record says --

    def value(self, record, key, option):
        found = looked_up(record, key)
        if found is not MISSING:
            return found
        raise Refused(f"no key \"{key}\"; set --{option} to one of those present: "
                      f"{', '.join(map(repr, record)) or 'none'}")

    def text(self, record, key, option):
        found = self.value(record, key, option)
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            raise Refused(f"\"{key}\" is a list, but text is needed; lists of messages need "
                          "--apply_chat_template")
        raise Refused(f"\"{key}\" is {json.dumps(found)[:40]}, but text is "
                      f"needed; or set --{option}")

    def messages(self, record, key, option, role):
        found = self.value(record, key, option)
        if isinstance(found, str):
            return [{"role": role, "content": found}]
        found = [found] if isinstance(found, dict) else found
        if not isinstance(found, list) or not found:
            raise Refused(f"\"{key}\" is {json.dumps(found)[:40]}, but text or a list "
                          "of messages is needed")
        listed = [message_of(message, f"\"{key}\"[{i}]") for i, message in enumerate(found)]
        # ShareGPT's, beside the conversation
        first = record.get("system") if "from" in found[0] else None
        if first and key == self.o.input_key and listed[0]["role"] != "system":
            listed = [message_of({"role": "system", "content": first}, '"system"'), *listed]
        return listed

    def asks(self, record):
        """Is this Alpaca's, and no key was given that means something else?"""
        return (self.o.alpaca and isinstance(record.get("instruction"), str) and
                ("input" in record or "output" in record))

    def asked(self, record):
        """Alpaca's record as one with a prompt, its instruction and input below each other; and
        the key of the response."""
        if not self.asks(record):
            return record, self.o.output_key
        more, before = record.get("input"), alpaca_before(record)
        if more is not None and not isinstance(more, str):
            raise Refused(f"\"input\" is {json.dumps(more)[:40]}, but beside \"instruction\" "
                          "text is needed; or set --input_key")
        if before and not self.template:
            raise Refused("\"system\" and \"history\" need a chat template; add "
                          "--apply_chat_template, or set --input_key to leave them out")
        prompt = "\n".join(filter(None, (record["instruction"], more)))
        prompt = [*before, {"role": "user", "content": prompt}] if before else prompt
        return {**record, "input": prompt}, self.o.output_key or "output"

    def given(self, key, response):
        if not response:
            raise Refused(f"\"{key}\" is empty, but a response needs a token; fill it "
                          "or remove the record")

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
        llama = "Llama" in str(config.get("tokenizer_class"))
        begins = config.get("add_bos_token", llama) and not self.blocks()
        form = self.named.form if self.named else {}
        text += form.get("text_ends", special["eos_token"])
        text = (special.get("bos_token", "") if begins else "") + text
        return Draft(turns=[([], [text])])

    def blocks(self):
        return bool(self.infos) and self.infos[0].blocks

    def sft(self, record):
        o = self.o
        if self.infos and "text" in record:
            return [self.whole_text(record["text"])], None
        record, answer = self.asked(record)
        if self.template:
            messages = self.messages(record, o.input_key, "input_key", "user")
            if answer:
                said = self.messages(record, answer, "output_key", "assistant")
                messages = joined(messages, said, answer)
            return [self.conversation(record, messages, o.train_on == "last")], None
        return [self.text_draft(record, answer)], None

    def text_draft(self, record, answer):
        """Of prompt and response without a chat template, or of the prompt, which is all."""
        o, learns_all = self.o, self.o.train_on == "all"
        found = self.known(known_prompt, record) if orca(record) else None
        if found:
            return Draft(prompt=found[1], response=record["response"], supervised=learns_all,
                         ends=True)
        prompt = self.text(record, o.input_key, "input_key")
        if not answer or o.pretrain_mode:
            ends = not o.pretrain_mode or o.pretrain_eos
            return Draft(prompt="", response="", text=prompt, ends=ends)
        response = self.text(record, answer, "output_key")
        prompt = self.formed(prompt) if response else ""
        return Draft(prompt=prompt, response=response, supervised=learns_all, ends=True)

    def pairs(self, record):
        o = self.o
        shared = o.prompt_key or ("input" if self.asks(record) else None)
        if not o.prompt_key:
            record, _ = self.asked(record)
        margin = self.margin(record)
        keys = ((o.chosen_key, "chosen_key"), (o.rejected_key, "rejected_key"))
        pair = self.pair_of_chats if self.template else self.pair_of_texts
        return pair(record, shared, keys), margin

    def margin(self, record):
        key = self.o.margin_key
        margin = looked_up(record, key)
        if margin is MISSING or margin is None:
            return math.nan
        number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
        if not number or not math.isfinite(margin):
            raise Refused(f"\"{key}\" is {json.dumps(margin)[:40]}, but a finite number is "
                          "needed; or set --margin_key")
        return float(margin)

    def pair_of_chats(self, record, prompt_key, keys):
        shared = self.messages(record, prompt_key, "prompt_key", "user") if prompt_key else []
        for key, option in keys:
            if not shared and isinstance(self.value(record, key, option), str):
                raise Refused(f"\"{key}\" is text without a prompt; give --prompt_key, "
                              "or lists of messages")
        sides = [self.messages(record, key, option, "assistant") for key, option in keys]
        if shared:
            asked = shared[-1]["content"]
            self.counts["asked_twice"] += bool(asked) and all(
                side[0]["role"] == "assistant" and (side[0]["content"] or "").startswith(asked)
                for side in sides)
            sides = [joined(shared, side, key) for (key, _), side in zip(keys, sides)]
        for (key, _), side in zip(keys, sides):
            if side[-1]["role"] != "assistant":
                raise Refused(f"\"{key}\" ends with a message of {side[-1]['role']}, but a "
                              "pair is about the assistant's last; end it there")
        return [self.conversation(record, side, True, True) for side in sides]

    def pair_of_texts(self, record, key, keys):
        found = self.known(known_pair, record)
        _, asked, sides = found or (None, None, [self.text(record, *key) for key in keys])
        for (side_key, _), side in zip(keys, sides):
            self.given(side_key, side)
        if not key and asked is None:
            self.no_other_prompt(record, sides)
            shared = common_prompt(*sides)
            return [Draft(prompt=side[:shared], response=side[shared:], ends=True)
                    for side in sides]
        if asked is None:
            asked = self.text(record, key, "prompt_key")
            self.counts["asked_twice"] += bool(asked) and all(
                side.startswith(asked) for side in sides)
            asked = self.formed(asked)
        return [Draft(prompt=asked, response=side, ends=True) for side in sides]

    def no_other_prompt(self, record, sides):
        """Answers without a prompt, and a prompt that nobody asked for beside them?"""
        prompt = record.get("prompt")
        if isinstance(prompt, str) and not sides[0].startswith(prompt):
            raise Refused("there is a \"prompt\", but the answers do not begin with "
                          "it; give --prompt_key prompt")

    def labelled(self, record):
        o = self.o
        record, _ = self.asked(record)
        label = self.value(record, o.label_key, "label_key")
        known = isinstance(label, (bool, int, float, str))
        liked = {True: 1, "1": 1, False: 0, "0": 0}.get(label) if known else None
        if liked is None:
            raise Refused(f"\"{o.label_key}\" is {json.dumps(label)[:40]}, but it must be "
                          "true or false, 1 or 0")
        if self.template:
            messages = self.messages(record, o.input_key, "input_key", "user")
            whole = isinstance(looked_up(record, o.input_key), list)
            if looked_up(record, o.output_key) is not MISSING or not whole:
                said = self.messages(record, o.output_key, "output_key", "assistant")
                messages = joined(messages, said, o.output_key)
            return [self.conversation(record, messages, True, True)], liked
        response = self.text(record, o.output_key, "output_key")
        self.given(o.output_key, response)
        prompt = self.formed(self.text(record, o.input_key, "input_key"))
        return [Draft(prompt=prompt, response=response, ends=True)], liked

    def prompts(self, record):
        o = self.o
        record, _ = self.asked(record)
        answer = self.value(record, o.label_key, "label_key") if o.label_key else ""
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = json.dumps(answer)
        if not isinstance(answer, str):
            raise Refused(f"\"{o.label_key}\" is {json.dumps(answer)[:40]}, but the right "
                          "answer must be text or a number")
        if self.named:
            messages = self.messages(record, o.input_key, "input_key", "user")
            draft = self.named.draft(messages, o, "user")
            return [draft], (self.named.text(draft), answer)
        if self.template:
            tools = tools_of(record)
            messages = self.messages(record, o.input_key, "input_key", "user")
            messages = self.template.settled(messages, tools)
            text = self.template.render(messages, tools, True) + self.wanted_reward()
            return [Draft(text=text, spans=[])], (text, answer)
        found = self.known(known_prompt, record)
        text = found[1] if found else self.formed(self.text(record, o.input_key, "input_key"))
        text += self.wanted_reward()
        return [Draft(prompt=text, response="")], (text, answer)

    def wanted_reward(self):
        """Behind a prompt, of a model that learnt to go by it: conditional SFT."""
        return "" if self.o.csft_prompt is None else self.o.csft_prompt.strip() + " "

    # -- steps: texts in which each placeholder has a label --

    def step_label(self, label, where):
        """Target and share."""
        o = self.o
        if isinstance(label, str):
            if not self.choices:
                return self.token(label, where), 1.0
            if label not in self.choices:
                raise Refused(f"{where} is {json.dumps(label)[:40]}, which is none of "
                              f"--reward_tokens {o.reward_tokens}")
            return self.choices[label], 1.0
        if not isinstance(label, (bool, int, float)):
            raise Refused(f"{where} is {json.dumps(label)[:40]}, but a token "
                          "or a number is needed")
        if len(self.choices) != 2:
            raise Refused(f"{where} is {json.dumps(label)[:40]}, a soft label (the probability "
                          "of the first of two tokens), but --reward_tokens names "
                          f"{len(self.choices)}; name two, or give tokens as labels")
        if not 0 <= label <= 1:
            raise Refused(f"{where} is {json.dumps(label)[:40]}, but a soft label "
                          "must be from 0 to 1")
        return next(iter(self.choices.values())), float(label)

    def steps(self, record):
        key = self.o.label_key
        text = self.text(record, self.o.input_key, "input_key")
        labels = self.value(record, key, "label_key")
        if not isinstance(labels, list):
            raise Refused(f"\"{key}\" is {json.dumps(labels)[:40]}, but a list is needed, "
                          "a label for each step")
        draft = Draft(text=text)
        draft.labels = [self.step_label(label, f"{key}[{k}]") for k, label in enumerate(labels)]
        return [draft], None
