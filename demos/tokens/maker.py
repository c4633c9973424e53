# SPDX-License-Identifier: MIT OR Unlicense
"""Records as documents: what one process of --workers does.

A batch of records becomes drafts, then tokens; what is too long is cut or left out; the bytes
of all that is kept go to the first process, with what was counted.
"""
import array
import collections
from .base import Refused, little, reason, record_of
from .chat_template import Template, template_text
from .dataset_info import Lapsed, infos_of
from .drafts import Draft, cut_both
from .known_sets import LeftOut
from .model_folder import Folder
from .named_template import NamedTemplate
from .reader import Reader
from .token_file import ANSWER_OFFSETS, ANSWERS, IDS, LABELS, MARGINS, MASK, OFFSETS
from .token_file import PROMPT_OFFSETS, PROMPTS, SHARES, TARGETS

COMPLETIONS = 64  # documents that axolotl makes of one text at most
IGNORED = -100  # as SEQPAR_IGNORE


class Maker(Reader):
    """Documents of records: what a process of --workers has."""

    named = infos = None

    def __init__(self, options, now):
        self.o = options
        self.folder = Folder(options.pretrain)
        if options.template:
            self.named = NamedTemplate(options.template, self.folder, options.default_system)
        self.template = self.named
        if options.apply_chat_template:
            text = template_text(options.tokenizer_chat_template, self.folder)
            self.template = Template(text, self.folder, now)
        self.infos = infos_of(options) if options.dataset_info else None
        self.counts = collections.Counter()
        self.shape = getattr(self, options.kind)  # the method of Reader
        if options.kind == "steps":
            self.placeholder = self.token(options.placeholder_token, "--placeholder_token")
            marks = options.reward_tokens.split()
            self.choices = {one: self.token(one, "--reward_tokens") for one in marks}
            if len(set(self.choices.values())) < len(marks):
                raise Refused(f"--reward_tokens {options.reward_tokens} are not all different "
                              "tokens; name each once")

    def parted(self, d):
        """axolotl makes documents of --max_len tokens of a long text."""
        most = self.o.max_len or len(d.ids)
        ids, parts = d.ids[:COMPLETIONS * most], []
        for at in range(0, len(ids), most):
            part = Draft()
            part.ids, part.prompt_tokens = ids[at:at + most], 0
            part.mask = bytearray(b"\1") * len(part.ids)
            parts += [part] if len(part.ids) > 1 else []
        return parts

    def fits(self, d, response):
        """Cuts a document that is too long, as --truncation says; False: it is left out.
        response: tokens of the answer, of a pair those of the longer one. The rules are those
        of the trainers (demos/trainer/data/data.h)."""
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
        counts, unknown = self.counts, self.folder.unknown
        whole = sum(len(d.ids) for d in drafts)
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
            counts["unknown"] += unknown is not None and unknown in d.ids
        counts["cut"] += sum(len(d.ids) for d in drafts) < whole
        counts["kept"] += 1
        if len(drafts) == 2:
            one, other = (d.ids[:d.prompt_tokens] for d in drafts)
            counts["two_prompts"] += one != other
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
                if self.infos:
                    record = self.infos[which].converted(record)
                made.append((*self.shape(record), where))
            except Lapsed:
                self.counts.update(read=1, lapsed=1)
            except LeftOut:
                self.counts.update(read=1, ties=1)
            except (Refused, RecursionError, MemoryError) as why:
                why = why if isinstance(why, Refused) else reason(why)
                raise Refused(f"{where}: {why}") from None
        if made:
            self.tokenize_all(made)
            self.look_at_prompt(made[0][0][0])
        if self.infos and self.o.kind == "sft":
            made = [([part], more, where) for (d,), more, where in made
                    for part in (self.parted(d) if d.text is not None and d.ends else [d])]
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
            sections = ((PROMPT_OFFSETS, PROMPTS, 0), (ANSWER_OFFSETS, ANSWERS, 1))
            for lengths, texts, which in sections:
                written = [more[which].encode() for _, more in kept]
                out[texts], out[lengths] = b"".join(written), [len(text) for text in written]
        elif self.o.kind == "steps":
            out.update(self.step_sections(documents))
        return out

    def step_sections(self, documents):
        targets, shares = array.array("i"), array.array("f")
        for d in documents:
            labels = iter(d.labels)
            for learnt in d.mask:
                target, share = next(labels) if learnt else (IGNORED, 0.0)
                targets.append(target)
                shares.append(share)
        return {TARGETS: little("i", targets), SHARES: little("f", shares)}
