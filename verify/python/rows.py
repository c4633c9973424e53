# SPDX-License-Identifier: MIT OR Unlicense
"""Packed rows of documents, and the share of one that a rank holds: tokens, positions, labels.

A row has the documents' tokens one after the other; cu_seqlens says where each begins. Labels are shifted over the
whole row, before it is split. Mistakes of layout, positions and labels are planted here.
"""
import random
from dataclasses import dataclass

import torch

IGNORED = -100
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)


@dataclass
class Row:
    ids: torch.Tensor  # (T)
    cu_seqlens: torch.Tensor  # (documents + 1)
    targets: torch.Tensor  # (T), not shifted: the token where it is to be predicted, IGNORED in prompts
    rewards: torch.Tensor = None  # of each document, as all below
    groups: torch.Tensor = None
    desirable: torch.Tensor = None
    mismatched: "Row" = None  # the same prompts, each with the completion of the document after it

    def __len__(self):
        return len(self.ids)

    @property
    def documents(self):
        return len(self.cu_seqlens) - 1

    def document_of(self, places):
        return torch.searchsorted(self.cu_seqlens, places, right=True) - 1


# ---- making them up ----

def make_rows(c):
    """rows[d][a] is what replica d trains on in micro-batch a. The same on all ranks, for whoever splits them."""
    for attempt in range(1000):
        rows = _draw_rows(c, random.Random(f"rows {c.seed} {attempt}"))
        if any((shift(row.targets, row) != IGNORED).any() for of_replica in rows for row in of_replica):
            return rows  # some rows may have nothing to learn; the step has
    raise ValueError(f"no rows for {c}")


def _draw_rows(c, draw):
    # of ppo: a group's documents answer the same prompt, and some group has two
    prompts = [_tokens(c, draw, 2 + g) for g in range(2 if c.dp * c.accumulation == 1 else 3)]
    count = 0
    rows = []
    for d in range(c.dp):
        rows.append([])
        for a in range(c.accumulation):
            rows[-1].append(_row(c, draw, prompts, count, (d if c.dp > 1 else a) % 2 == 0))
            count += rows[-1][-1].documents
    return rows


def _row(c, draw, prompts, count, large):
    """Documents of odd lengths that differ pairwise; some of one token, which nothing is predicted in."""
    in_pairs = c.objective in ("dpo", "rm")
    least = {"sft": 1, "ppo": 4 if len(prompts) == 2 else 2}.get(c.objective, 2)
    number = 2 * draw.randint(1, 2) if in_pairs else draw.randint(least, 5)
    lengths = draw.sample(PRIMES, number)
    if c.documents == "lopsided":  # replicas, or micro-batches, have far more to learn in turn
        lengths = draw.sample(PRIMES[4:], 3) if large else draw.sample(PRIMES[:3], 2)
    if c.documents == "several" and len(lengths) == 1:
        lengths = [13, 17]
    if c.documents == "one":
        lengths = [37]
    if c.documents == "long_prompt":  # nothing is supervised on the first ranks
        lengths = [31, draw.choice((11, 13, 17, 19, 23))]
    if c.documents == "tiny":  # fewer tokens than ranks, perhaps
        lengths = [draw.choice((1, 2, 3))]
    groups = [(count + i) % len(prompts) for i in range(len(lengths))]
    begins = [_begin(c, draw, lengths, i, prompts[groups[i]]) for i in range(len(lengths))]
    completions = [_tokens(c, draw, n - len(p)) for n, p in zip(lengths, begins)]
    if c.objective in ("sft", "rm") and c.documents == "ordinary" and draw.random() < 0.5:
        i = draw.randrange(len(lengths))  # a document of one token
        begins[i], completions[i] = [], _tokens(c, draw, 1)
    if c.objective == "sft" and c.documents in ("ordinary", "several") and draw.random() < 0.2:
        begins.append([0] * draw.randint(1, 6))  # padding, as a document that nothing is learned from
        completions.append([])
        lengths, groups = lengths + [0], groups + [0]
    if c.length != "any":
        _fit(c, draw, completions, sum(map(len, begins + completions)))
    row = pack(begins, completions, first_is_target=c.mistake == "labels_cross_documents")
    rewards = [draw.choice((0.0, 0.25, 1.0, 1.5)) + draw.random() / 8 for _ in lengths]
    row.rewards = torch.tensor(rewards, dtype=torch.float64)
    row.groups = torch.tensor(groups)
    row.desirable = torch.tensor([draw.randint(0, 1) for _ in lengths])
    if c.objective == "kto":
        row.mismatched = pack(begins, completions[1:] + completions[:1])
    return row


def _begin(c, draw, lengths, i, prompt):
    """A document's prompt, which is not trained on. Those of a pair, and those of a group, are the same."""
    if c.documents == "no_prompt":
        return []
    if c.documents == "long_prompt":
        return _tokens(c, draw, (29, 1)[i])
    if c.objective == "ppo":
        return prompt[:lengths[i] - 1]
    if c.objective in ("dpo", "rm"):
        pair = lengths[i - i % 2:i - i % 2 + 2]
        same = random.Random(f"pair {c.seed} {pair}")
        return _tokens(c, same, same.randint(1, min(pair) - 1))
    return _tokens(c, draw, draw.randint(0, lengths[i] - 1))


def _fit(c, draw, completions, total):
    """Makes the row's length a multiple of all shares there can be, or one of none."""
    while total % (2 * c.sp) != 0 if c.length == "even" else total % c.sp == 0:
        completions[-1] = completions[-1] + _tokens(c, draw, 1)
        total += 1


def _tokens(c, draw, number):
    """0 is a token like any other: padding must not be told by it."""
    return [0 if draw.random() < 0.1 else draw.randrange(c.vocab) for _ in range(number)]


def pack(prompts, completions, first_is_target=False):
    ids, targets, cu_seqlens = [], [], [0]
    for prompt, completion in zip(prompts, completions):
        document = [IGNORED] * len(prompt) + completion
        if not first_is_target:  # nothing before it predicts it
            document[:1] = [IGNORED]
        ids += prompt + completion
        targets += document
        cu_seqlens.append(len(ids))
    return Row(*(torch.tensor(x, dtype=torch.int64) for x in (ids, cu_seqlens, targets)))


# ---- splitting them ----

def split(row, layout, sp):
    """Places in the row that each rank holds, ascending."""
    length = len(row)
    if layout == "stripe":
        return [torch.arange(length)[r::sp].clone() for r in range(sp)]
    if layout == "contiguous":
        return [_piece(0, length, r, sp) for r in range(sp)]
    documents = row.cu_seqlens.tolist() if layout == "zigzag_doc" else [0, length]
    return [torch.cat([_piece(begin, end, i, 2 * sp) for begin, end in zip(documents, documents[1:])
                       for i in (r, 2 * sp - 1 - r)]) for r in range(sp)]


def _piece(begin, end, i, pieces):
    n = end - begin
    return torch.arange(begin + i * n // pieces, begin + (i + 1) * n // pieces)


def hold(c, row, ranks):
    """What each rank of this sequence holds: split(), if no mistake is planted in it."""
    if c.mistake == "token_lost":
        kept = len(row) // ranks.sp * ranks.sp
        return split(Row(row.ids[:kept], row.cu_seqlens.clamp(max=kept), None), c.layout, ranks.sp)
    places = split(row, c.layout, ranks.sp)
    if c.mistake == "token_held_twice" and c.variant == "overlap":  # begins with the last token of the share before
        return places[:1] + [torch.cat((p[:1] - 1, p)) for p in places[1:]]
    if c.mistake == "token_held_twice":  # split by the replica's number, not by the number in the sequence
        return [places[ranks.replica % ranks.sp]] * ranks.sp
    return places


def shift(targets, row=None):
    """What each token is to predict. Without a row: as a model does that knows of no documents."""
    labels = torch.cat((targets[1:], targets.new_full((min(1, len(targets)),), IGNORED)))
    if row is not None:
        labels[row.cu_seqlens[1:] - 1] = IGNORED
    return labels


def labels_of(c, row, places):
    if c.mistake == "shift_after_split":
        own = row.targets[places]
        return own.roll(-1) if c.variant == "rolled" else shift(own)
    if c.mistake == "labels_not_shifted":
        return row.targets[places]
    if c.mistake == "labels_cross_documents":
        return shift(row.targets)[places]
    if c.mistake == "labels_shifted_twice":
        once = shift(row.targets, row)
        return shift(once[places]) if c.variant == "in_the_model" else shift(once)[places]
    if c.mistake == "token_lost" and c.variant == "before_shift":
        kept = len(row) // c.sp * c.sp
        return shift(row.targets[:kept], Row(row.ids[:kept], row.cu_seqlens.clamp(max=kept), None))[places]
    return shift(row.targets, row)[places]


def positions_of(c, row, places):
    """Places in their documents, for the rotary embedding."""
    if c.mistake == "positions_run_on":
        return places
    document = row.document_of(places)
    if c.mistake != "positions_local":
        return places - row.cu_seqlens[document]
    local = torch.arange(len(places))
    if c.variant == "rank" or not len(places):
        return local
    begins = torch.cat((torch.ones(1, dtype=torch.bool), document[1:] != document[:-1]))
    return local - torch.cummax(torch.where(begins, local, 0), 0).values


class MicroBatch:
    """A rank's share of a row, and what the step finds out of it."""

    def __init__(self, c, row, ranks, number=0):
        self.row, self.number, self.all_places = row, number, hold(c, row, ranks)
        self.index = self.all_places[ranks.member]
        self.document = row.document_of(self.index)
        self.ids = row.ids[self.index]
        self.positions = positions_of(c, row, self.index)
        self.labels = labels_of(c, row, self.index)
        self.supervised = self.labels != IGNORED
        self.divisor = 1

    def by_document(self, x):
        """x of this rank's tokens added up, document by document. Only where there is a label."""
        x = torch.where(self.supervised, x, torch.zeros((), dtype=x.dtype))
        return torch.zeros(self.row.documents, dtype=x.dtype).index_add(0, self.document, x)
