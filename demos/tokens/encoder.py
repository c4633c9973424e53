# SPDX-License-Identifier: MIT OR Unlicense
"""Drafts as tokens: ids, and a mask of what is learnt.

A conversation is tokenized once, as a whole, and the tokenizer's offsets say which tokens hold
the characters that the assistant says. Prompt and response are tokenized apart. What is learnt
must read as what was said: else the offsets are wrong, and the draft is refused.
"""
import bisect
import unicodedata
from .base import Refused, little


def canonical(text):
    """Without what a normalizer may change."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(text.replace("\u2581", " ").split())


def span_tokens(encoding, begin, end, count):
    """Tokens first .. last + 1 that hold a character of this span."""
    forwards = map(encoding.char_to_token, range(begin, end))
    first = next((t for t in forwards if t is not None), None)
    if first is None:
        raise Refused(f"the tokenizer drops the characters {begin} to {end} of a "
                      "conversation, which the assistant says; give a "
                      "tokenizer that keeps them")
    backwards = map(encoding.char_to_token, range(end - 1, begin - 1, -1))
    last = next(t for t in backwards if t is not None)
    # a character may be several tokens
    while last + 1 < count and encoding.token_to_chars(last + 1)[0] < end:
        last += 1
    return first, last + 1


class Encoder:
    """Turns drafts into tokens. A Maker, which is one, has o, folder, counts, placeholder."""

    def encode(self, tokenizer, texts):
        try:
            return iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        except (UnicodeEncodeError, TypeError):  # by version
            raise Refused("a text holds half a character (a lone surrogate such "
                          "as \\ud800); remove it")

    def token(self, text, what):
        """The one token that a text is."""
        ids = next(self.encode(self.folder.fresh, [text])).ids
        if len(ids) != 1:
            raise Refused(f"{what}: {text!r} is {len(ids)} tokens, {ids[:8]}; "
                          "give a text that is one")
        return ids[0]

    def tokenize(self, drafts):
        fresh, going_on = [], []
        for d in drafts:
            fresh += d.texts()
            if d.text is None and not d.turns:
                going_on.append(d.response)
        fresh = self.encode(self.folder.fresh, fresh)
        going_on = self.encode(self.folder.going_on, going_on)
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
            d.mask += bytes([d.supervised]) * (middle - begin)
            d.mask += bytes([learnt]) * (sum(end) - middle if end else 0)
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
        # a response ends with its stop token, as one that is sampled does
        if d.trims and not d.text[d.spans[-1][1]:].strip():
            d.ids, d.mask = d.ids[:end], d.mask[:end]

    def checked(self, d, first, end, begin, stop):
        """What is learnt must read as what the span says."""
        ids, text = d.ids[first:end], d.text[begin:stop]
        read = b"".join([self.folder.word[i] for i in ids])
        if read == text.encode() or self.folder.unknown in ids:
            return
        read = read.decode(errors="replace")
        if canonical(text) not in canonical(read):
            raise Refused(f"the tokens of what the assistant says read {read[:60]!r}, not "
                          f"{text[:60]!r}; the tokenizer's offsets cannot be relied on, pip "
                          "install -U tokenizers")

    def step_tokens(self, d, ids):
        d.ids, d.mask, d.prompt_tokens = ids, bytearray(i == self.placeholder for i in ids), 0
        steps, text = d.mask.count(1), self.o.placeholder_token
        if ids and not steps:
            raise Refused(f"the text has no placeholder {text!r} as a token of its own, so no "
                          "step has a label; put it after each step, or name another by "
                          "--placeholder_token")
        if ids and steps != len(d.labels):
            raise Refused(f"{len(d.labels)} labels in \"{self.o.label_key}\" for {steps} "
                          f"placeholders {text!r}; give one for each")

    def look_at_prompt(self, d):
        """Has a prompt alone, which texts are sampled for, the tokens that it has before an
        answer? One of a batch is asked."""
        if d.spans and d.spans[0][0]:
            prompt = next(self.encode(self.folder.fresh, [d.text[:d.spans[0][0]]])).ids
            self.counts["apart"] += prompt != d.ids[:d.prompt_tokens]

    def stream(self, item):
        """A part of a plain text as ids. It is tokenized with what is around it, whose tokens
        are left out again, so that its own are those it has in the whole text; but where a
        token would reach into another part, it ends there."""
        _, before, text, after = item
        tokenizer = self.folder.going_on if before else self.folder.fresh
        while True:
            encoding = next(self.encode(tokenizer, [before + text + after]))
            begins = [begin for begin, _ in encoding.offsets] + [len(before + text + after)]
            first, end = (bisect.bisect_left(begins, at)
                          for at in (len(before), len(before) + len(text)))
            first = first if before else 0
            if begins[first] > len(before):
                before = ""
            elif begins[end] > len(before) + len(text):
                after = ""
            else:
                return little("i", encoding.ids[first:end])
