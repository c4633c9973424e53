# SPDX-License-Identifier: MIT OR Unlicense
"""Documents that wait for the tokenizer, and how long ones are cut at both ends.

A Draft holds what a record said until the tokenizer has seen a whole batch of them, then the
tokens. A cut at both ends, of prompt and response, is that of LLaMA-Factory.
"""


class Draft:
    """A document whose texts wait for the tokenizer: a conversation, or prompt and response.
    turns: of a template by name, what is asked and what is said in pieces, later where these
    begin and end."""
    __slots__ = ("text", "spans", "prompt", "response", "supervised", "ends", "trims", "turns",
                 "last", "ids", "mask", "prompt_tokens", "labels")

    def __init__(self, text=None, spans=None, prompt=None, response=None, supervised=False,
                 ends=False, trims=False, turns=None, last=False):
        self.text, self.spans, self.prompt, self.response = text, spans, prompt, response
        self.supervised, self.ends, self.trims = supervised, ends, trims
        self.turns, self.last = turns, last
        self.labels = None  # of steps: target and share of each placeholder

    def texts(self):
        """What the tokenizer is given as texts of their own."""
        if self.turns:
            return [part for turn in self.turns for side in turn for part in side
                    if isinstance(part, str)]
        return [self.prompt if self.text is None else self.text]


def response_share(prompt, response, most):
    """Tokens of a response that LLaMA-Factory keeps of a prompt and a response of so many."""
    if 2 * response < most:
        return response
    if 2 * prompt < most:
        return min(response, most - prompt)
    return min(response, int(most * (response / (prompt + response))))


def turns_of(d):
    """Where each prompt begins, its response begins, and that ends: of a conversation, one for
    every turn that is learnt."""
    if d.turns:
        return d.turns
    if d.spans is None:
        return [(0, d.prompt_tokens, len(d.ids))]
    begins = [t for t in range(1, len(d.ids)) if d.mask[t] and not d.mask[t - 1]]
    ends = [next((t for t in range(at, len(d.ids)) if not d.mask[t]), len(d.ids))
            for at in begins]
    return list(zip([0, *ends], begins, ends))


def cut_both(d, response, most):
    """Every turn loses the ends of its prompt and its response, until no room is left, as
    LLaMA-Factory does; the last turn is the first to have room where it alone is learnt."""
    if d.prompt_tokens + response <= most:
        return
    kept, room, turns = [], most, turns_of(d)
    for begin, middle, end in reversed(turns) if d.last else turns:
        if room <= 0:
            break
        said = response if len(turns) == 1 else end - middle
        share = response_share(middle - begin, said, room)
        sides = ((begin, min(middle, begin + max(room - share, 0))),
                 (middle, min(end, middle + share)))
        room -= sum(last - first for first, last in sides)
        kept.append(sides)
    spans = [span for sides in (reversed(kept) if d.last else kept) for span in sides]
    d.ids = [i for first, last in spans for i in d.ids[first:last]]
    d.mask = bytearray(b"".join(d.mask[first:last] for first, last in spans))
