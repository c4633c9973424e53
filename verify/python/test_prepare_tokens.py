# SPDX-License-Identifier: MIT OR Unlicense
"""How demos/prepare.py makes tokens of documents, case by case: what is learnt of them, and what is cut, kept and counted. A token is
a letter here; where a text goes on, its letters have ids from 200 on.

    test_prepare_tokens.py FOLDER
"""
import array
import collections
import types
from prepare_tables import OUT, Sentence, end, prepare, rows, write
from tokens import base, drafts, maker as shipped, reader, token_file
from tokens.dataset_info import Info
from tokens.drafts import Draft
from tokens.encoder import span_tokens
from tokens.option_rules import settle

BOS, EOS, PAD, UNKNOWN = 1, 2, 3, 4


class Encoding:
    """Tokens that begin and end at these characters."""

    def __init__(self, ids, places):
        self.ids, self.offsets = ids, places

    def token_to_chars(self, token):
        return self.offsets[token]

    def char_to_token(self, at):
        return next((t for t, (begin, stop) in enumerate(self.offsets) if begin <= at < stop), None)


class Letters:
    """A tokenizer; these texts are one token each, with their ids."""

    def __init__(self, more=0, whole=None):
        self.more, self.whole = more, whole or {}

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [self.encoding(text) for text in texts]

    def encoding(self, text):
        if "\ud800" in text:
            raise UnicodeEncodeError("utf-8", text, 0, 1, "")
        ids, places, at = [], [], 0
        while at < len(text):
            known = next((one for one in self.whole if text.startswith(one, at)), text[at])
            ids.append(self.whole[known] if known in self.whole else ord(known) + self.more)
            places.append((at, at + len(known)))
            at += len(known)
        return Encoding(ids, places)


class Folder:
    bos, eos, pad, unknown, vocab, stops, prefix = BOS, EOS, PAD, None, 400, [EOS], [BOS]

    def __init__(self, whole=None, **more):
        self.fresh, self.going_on = Letters(0, whole), Letters(200, whole)
        self.word = [chr(i % 200).encode() for i in range(400)]
        for text, i in (whole or {}).items():
            self.word[i] = text.encode()
        self.special, self.config = {}, {}
        vars(self).update(more)


DATA = write("data.jsonl", '{"input": "a"}\n')


class Maker(shipped.Maker):
    """A maker of documents with this folder."""

    def __init__(self, words="", folder=None, infos=None):
        self.o = prepare.options_of(["--pretrain", "none", "--output", f"{OUT}/new.tokens", "--dataset", DATA, *words.split()])
        settle(self.o)
        self.folder, self.infos, self.template, self.named = folder or Folder(), infos, None, None
        self.counts, self.shape = collections.Counter(), getattr(self, self.o.kind)


def draft(ids=(), mask=(), prompt_tokens=0, **more):
    made = Draft(**more)
    made.ids, made.mask, made.prompt_tokens = list(ids), bytearray(mask), prompt_tokens
    return made


def tokens(d):
    return d.ids, list(d.mask), d.prompt_tokens


# ---- each way of a document ----


def plain(words, ids, ends, prefix=(BOS,)):
    made = draft(ends=ends)
    Maker(words, Folder(prefix=list(prefix))).plain_tokens(made, list(ids))
    return tokens(made)


rows("plain_tokens", plain, [
    (("", [7, 8], True), ([1, 7, 8, 2], [1, 1, 1, 1], 0)), (("", [7], False), ([1, 7], [1, 1], 0)), (("", [7], True, ()), ([7, 2], [1, 1], 0)),
    (("", [], True), ([], [], 0)), (("--pretrain_mode --pretrain_eos --pretrain_blocks", [7], True), ([7, 2], [1, 1], 0))])


def response(prompt, said, ends, supervised=False):
    made = draft(ends=ends, supervised=supervised)
    Maker().response_tokens(made, list(prompt), list(said))
    return tokens(made)


rows("response_tokens", response, [
    (([7, 8], [9], True), ([1, 7, 8, 9, 2], [0, 0, 0, 1, 1], 3)), (([7], [9], True, True), ([1, 7, 9, 2], [1, 1, 1, 1], 2)),
    (([], [9], True), ([1, 9, 2], [0, 1, 1], 1)),
    (([7], [], True), ([], [], 0)), (([7], [9], False), ([1, 7, 9], [0, 0, 1], 2)), (([7], [], False), ([1, 7], [0, 0], 2))])


def turns(found, supervised=False, last=False, words="", pad=PAD):
    made = draft(turns=found, supervised=supervised, last=last)
    maker = Maker(words, Folder(pad=pad))
    maker.turns_tokens(made, maker.encode(Letters(), made.texts()))
    return tokens(made) + (made.turns,)


A, B = ([BOS, "ab"], ["c", EOS]), (["d"], ["ef", EOS])
AB = [1, 97, 98, 99, 2, 100, 101, 102, 2]
rows("turns_tokens", turns, [
    (([A],), (AB[:5], [0, 0, 0, 1, 1], 3, [[0, 3, 5]])), (([A, B],), (AB, [0, 0, 0, 1, 1, 0, 1, 1, 1], 3, [[0, 3, 5], [5, 6, 9]])),
    (([A, B], True), (AB, [1] * 9, 3, [[0, 3, 5], [5, 6, 9]])),
    (([A, B], False, True), (AB, [0, 0, 0, 0, 0, 0, 1, 1, 1], 3, [[0, 3, 5], [5, 6, 9]])),
    (([A, B], True, True), (AB, [1, 1, 1, 0, 0, 1, 1, 1, 1], 3, [[0, 3, 5], [5, 6, 9]])), (([A[:1]],), (AB[:3], [0, 0, 0], 3, [[0, 3]])),
    (([A[:1]], True), (AB[:3], [1, 1, 1], 3, [[0, 3]])), (([([], ["ab", PAD, EOS])], False, False, "--pretrain_mode"),
     ([97, 98, 3, 2], [1, 1, 0, 1], 0, [[0, 0, 4]])),
    (([([], ["ab", 0, EOS])], False, False, "--pretrain_mode", -1), ([97, 98, 0, 2], [1, 1, 1, 0], 0, [[0, 0, 4]])),
    (([([], ["ab", 0, EOS])], False, False, "--pretrain_mode", 0), ([97, 98, 0, 2], [1, 1, 0, 1], 0, [[0, 0, 4]]))])


def conversation(text, spans, whole=None, trims=False):
    maker, made = Maker("", Folder(whole)), draft(text=text, spans=spans, trims=trims)
    maker.conversation_tokens(made, Letters(0, whole).encoding(text))
    return tokens(made) + (maker.counts["merged"],)


CODES = [ord(c) for c in "qabr\n"]
rows("conversation_tokens", conversation, [
    (("qab", [(1, 3)]), (CODES[:3], [0, 1, 1], 1, 0)), (("qabr", [(1, 2), (3, 4)]), (CODES[:4], [0, 1, 0, 1], 1, 0)),
    (("qabr", [(2, 3), (0, 1)]), (CODES[:4], [1, 0, 1, 0], 0, 0)),
    (("qab", []), (CODES[:3], [0, 0, 0], 3, 0)), (("qab", [(1, 3)], {"qa": 300}), ([300, 98], [1, 1], 0, 1)),
    (("qabr", [(1, 2), (3, 4)], {"qa": 300}), ([300, 98, 114], [1, 0, 1], 0, 1)),
    (("qab\n", [(1, 3)], None, True), (CODES[:3], [0, 1, 1], 1, 0)), (("qab\n", [(1, 3)]), (CODES[:3] + [10], [0, 1, 1, 0], 1, 0)),
    (("qabr", [(1, 3)], None, True), (CODES[:4], [0, 1, 1, 0], 1, 0)),
    (("qabr\n", [(0, 1), (2, 4)], None, True), (CODES[:4], [1, 0, 1, 1], 0, 0)),
    (("qabr", [(0, 1), (1, 2)], None, True), (CODES[:4], [1, 1, 0, 0], 0, 0))])


def checked(ids, text, unknown=None):
    made = draft([81, *ids, 82], text="X" + text + "Y", spans=[])
    return Maker("", Folder(unknown=unknown)).checked(made, 1, 1 + len(ids), 1, 1 + len(text))


def reads(read, text):
    return Sentence(f"the tokens of what the assistant says read {read!r}, not {text!r}; the tokenizer's offsets cannot be relied on, pip install -U tokenizers")


rows("checked", checked, [
    (([97, 98], "ab"), None), (([97, 98], "aB"), None), (([97, 98, 99], "ab"), None), (([97], "ab"), reads("a", "ab")),
    (([97, UNKNOWN], "ab", UNKNOWN), None),
    (([97, UNKNOWN], "ab", 5), reads("a\x04", "ab")), (([97] * 70, "b" * 70), reads("a" * 60, "b" * 60))])


def other_tokens(text, read, spans):
    """Tokens that read otherwise than the text."""
    Maker().conversation_tokens(draft(text=text, spans=spans), Letters().encoding(read))


rows("conversation_checked", other_tokens, [
    (("qab", "qxb", [(1, 3)]), reads("xb", "ab")), (("qab", "xab", [(1, 3)]), None), (("qabr", "qabx", [(1, 2), (3, 4)]), reads("x", "r"))])


def look(text, spans, ids, prompt_tokens):
    maker = Maker()
    maker.look_at_prompt(draft(ids, (), prompt_tokens, text=text, spans=spans))
    return maker.counts["apart"]


rows("look_at_prompt", look, [
    (("qa", [(1, 2)], [113, 97], 1), 0), (("qa", [(1, 2)], [5, 97], 1), 1), (("qa", [(1, 2)], [113, 97], 2), 1),
    (("qa", [(0, 2)], [5, 97], 0), 0), (("qa", [], [5], 1), 0),
    (("qa", None, [5], 1), 0), (("qrab", [(2, 3), (3, 4)], [113, 114, 97, 98], 2), 0)])


def all_kinds():
    """Drafts of every way at once: each gets the texts that are its own."""
    steps = draft(text="s#")
    steps.labels = [None]
    drafts = [draft(prompt="pq", response="r", ends=True), draft(turns=[(["x", EOS], ["yz"])]), draft(text="uv", spans=[(1, 2)]), steps,
        draft(text="t", ends=True),
              draft(prompt="m", response="no", ends=False)]
    maker = Maker("--kind steps --placeholder_token #")
    maker.placeholder = 35
    maker.tokenize(drafts)
    return [tokens(d) for d in drafts]


rows("tokenize", all_kinds, [((), [
    ([1, 112, 113, 314, 2], [0, 0, 0, 1, 1], 3), ([120, 2, 121, 122], [0, 0, 1, 1], 2), ([117, 118], [0, 1], 1), ([115, 35], [0, 1], 0),
    ([1, 116, 2], [1, 1, 1], 0),
    ([1, 109, 310, 311], [0, 0, 1, 1], 2)])])
HALF = "a text holds half a character (a lone surrogate such as \\ud800); remove it"


def whose(*texts):
    Maker().tokenize_all([([draft(text=text)], None, f"at {i}") for i, text in enumerate(texts)])


rows("tokenize_all", whose, [(("a", "b"), None), (("a", "\ud800", "c"), Sentence(f"at 1: {HALF}")), (("\ud800",), Sentence(f"at 0: {HALF}")),
    (("a", "b", "\ud800"), Sentence(f"at 2: {HALF}"))])

# ---- what is too long ----

rows("response_share", drafts.response_share, [
    ((9, 4, 9), 4), ((9, 5, 10), 3), ((4, 20, 10), 6), ((5, 20, 10), 8), ((4, 5, 10), 5), ((4, 7, 10), 6), ((6, 6, 8), 4), ((6, 10, 8), 5),
    ((0, 9, 4), 4), ((3, 3, 2), 1), ((7, 1, 2), 0)])
rows("turns_of", lambda more, mask, prompt_tokens: [tuple(one) for one in drafts.turns_of(draft(range(len(mask)), mask, prompt_tokens,
    **more))], [
    (({"turns": [[0, 1, 2]]}, [0, 0, 1], 2), [(0, 1, 2)]), (({}, [0, 0, 1], 2), [(0, 2, 3)]),
    (({"spans": []}, [0, 0, 1, 1, 0, 1, 1], 2), [(0, 2, 4), (4, 5, 7)]),
    (({"spans": []}, [0, 1, 0], 1), [(0, 1, 2)]), (({"spans": []}, [1, 1, 0, 1], 0), [(0, 3, 4)]),
    (({"spans": []}, [0, 1, 0, 1, 0], 1), [(0, 1, 2), (2, 3, 4)])])


def cut(mask, prompt_tokens, response, most, **more):
    made = draft(range(len(mask)), mask, prompt_tokens, **more)
    drafts.cut_both(made, response, most)
    return made.ids, list(made.mask), type(made.mask).__name__


HALVES, TURNS = [0] * 6 + [1] * 6, [[0, 3, 6], [6, 9, 12]]
BY_TURNS = [0, 0, 0, 1, 1, 1] * 2
rows("cut_both", lambda mask, prompt, response, most, more: cut(mask, prompt, response, most, **more), [
    ((HALVES, 6, 6, 12, {}), (list(range(12)), HALVES, "bytearray")),
    ((HALVES, 6, 6, 11, {}), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0] * 6 + [1] * 5, "bytearray")),
    ((HALVES, 6, 6, 8, {}), ([0, 1, 2, 3, 6, 7, 8, 9], [0, 0, 0, 0, 1, 1, 1, 1], "bytearray")),
    ((HALVES, 6, 10, 8, {}), ([0, 1, 2, 6, 7, 8, 9, 10], [0, 0, 0, 1, 1, 1, 1, 1], "bytearray")),
    ((HALVES, 6, 2, 5, {}), ([0, 1, 2, 6, 7], [0, 0, 0, 1, 1], "bytearray")),
    ((BY_TURNS, 3, 9, 8, {"turns": TURNS}), ([0, 1, 2, 3, 4, 5, 6, 9], [0, 0, 0, 1, 1, 1, 0, 1], "bytearray")),
    ((BY_TURNS, 3, 9, 8, {"turns": TURNS, "last": True}), ([0, 3, 6, 7, 8, 9, 10, 11], [0, 1, 0, 0, 0, 1, 1, 1], "bytearray")),
    ((BY_TURNS, 3, 9, 6, {"turns": TURNS}), ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], "bytearray")),
    ((BY_TURNS, 3, 9, 6, {"turns": TURNS, "last": True}), ([6, 7, 8, 9, 10, 11], [0, 0, 0, 1, 1, 1], "bytearray")),
    ((BY_TURNS, 3, 9, 7, {"turns": TURNS}), ([0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1, 0], "bytearray")),
    ((BY_TURNS, 3, 9, 8, {"spans": []}), ([0, 1, 2, 3, 4, 5, 6, 9], [0, 0, 0, 1, 1, 1, 0, 1], "bytearray"))])
SENT = Sentence("the tokenizer drops the characters 1 to 3 of a conversation, which the assistant says; give a tokenizer that keeps them")
rows("span_tokens", lambda places, begin, stop, count: span_tokens(Encoding(None, places), begin, stop, count), [
    (([(0, 2), (2, 3), (2, 3), (3, 5)], 2, 3, 4), (1, 3)), (([(0, 2), (2, 3), (2, 3), (3, 5)], 0, 5, 4), (0, 4)),
    (([(0, 2), (2, 3), (2, 3), (3, 5)], 1, 2, 4), (0, 1)),
    (([(0, 2), (2, 3), (2, 3), (3, 5)], 3, 4, 4), (3, 4)), (([(0, 1), (3, 4)], 1, 3, 2), SENT), (([(0, 1), (2, 3)], 1, 4, 2), (1, 2)),
    (([(0, 1), (1, 2), (1, 2), (1, 2)], 1, 2, 4), (1, 4)),
    (([(0, 1), (1, 2), (1, 2), (1, 2)], 1, 2, 3), (1, 3)), (([(0, 1)], 0, 1, 1), (0, 1))])
rows("in_word", reader.in_word, [
    *(((character, 0), inside) for character, inside in (("a", True), ("Z", True), ("5", True), ("_", True), ("'", True), (" ", False),
     (".", False), ("\x7f", False), ("\x80", True), ("\u2028", True), ("-", False))),
    (("ab", -1), False), (("ab", 1), True), (("ab", 2), False), (("", 0), False)])
rows("common_prompt", reader.common_prompt, [
    *(((prompt + a, prompt + b), len(prompt)) for prompt, one, other in (
        ("We say", " yes", " no"), ("the", " cat", " car"), ("a", " b", " bc"), ("", "cat", "car"), ("so:\n", "don't", "don"),
        ("so:", " yes", " no"), ("x.", "yes", "no"), ("Human: q\n\nAssistant:", " a", " b"),
        ("Human: q\nAssistant: a\n", "Human: r\nAssistant: b", "Human: s\nAssistant: c, longer"),
        ("Human: q\nAssistant:", " a", " a\nHuman: x\nAssistant: y"),
        ("an Assistant: said", " this", " that"), ("Human: q\n", "User: so", "User: and"), ("", "User: a", "User: b"), ("x", "-a", "-"),
        ("", "a", ""), ("", "", ""))
      for a, b in ((one, other), (other, one))),
    (("Assistant:", "Assistant: a"), 10), (("Assistant:a", "Assistant:b"), 10), (("ab", "ab"), 0), (("a b", "a b"), 1), (("a  b", "a  c"), 2),
    ((" a", " b"), 0), (("a. ", "a. "), 2)])
rows("prompt_of_last", reader.common_prompt, [
    (("Human: q\nAssistant: a\nUser: so", "Human: q\nAssistant: a\nUser: and"), 19),
    (("Assistant: a\nHuman: x\nAssistant: b", "Assistant: a\nHuman: x\nAssistant: c"), 32),
    (("Human: a\nAssistant: b\nAssistant: c", "Human: a\nAssistant: b"), 19)])


def fits(words, ids, prompt_tokens, response=0, **more):
    blocks = more.pop("blocks", False)
    made = draft(ids, [1] * len(ids), prompt_tokens, **more)
    maker = Maker(words, None, [types.SimpleNamespace(blocks=True)] if blocks else None)
    return maker.fits(made, response), made.ids, list(made.mask)


def cut_to(n, last=None):
    return [*range(10, 10 + n - (last is not None))] + [last] * (last is not None), [1] * n


TEN, ELEVEN = list(range(10, 20)), list(range(10, 21))
PRETRAIN = "--pretrain_mode --pretrain_eos"
rows("fits", lambda words, ids, prompt_tokens, more=None: fits("--max_len 10 " + words, ids, prompt_tokens, **(more or {})), [
    (("", TEN, 3), (True, *cut_to(10))), (("", ELEVEN, 3), (True, *cut_to(10))), (("", ELEVEN, 3, {"ends": True}), (True, *cut_to(10, EOS))),
    (("", ELEVEN, 3, {"spans": []}), (True, *cut_to(10, EOS))),
    (("", ELEVEN, 3, {"turns": [[0]]}), (True, *cut_to(10, EOS))), (("", TEN, 3, {"ends": True}), (True, *cut_to(10))),
    (("", ELEVEN, 7), (True, *cut_to(10))), (("", TEN[:9], 8), (False, *cut_to(9))),
    (("", TEN[:8], 7), (True, *cut_to(8))), (("", ELEVEN, 8), (False, *cut_to(11))), (("", ELEVEN, 0), (True, *cut_to(10))),
    (("--truncation drop", TEN, 9), (True, *cut_to(10))), (("--truncation drop", ELEVEN, 9), (False, *cut_to(11))),
    (("--kind prompts", TEN, 9), (True, *cut_to(10))), (("--kind prompts", ELEVEN, 9), (False, *cut_to(11))),
    ((PRETRAIN, ELEVEN, 0, {"ends": True}), (True, *cut_to(10))),
    ((PRETRAIN + " --pretrain_blocks", ELEVEN, 0), (True, *cut_to(11))), (("", ELEVEN, 8, {"blocks": True}), (True, *cut_to(11))),
    (("--truncation cut_both", ELEVEN, 5, {"response": 6}), (True, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [1] * 10)),
    (("--truncation cut_both", TEN, 9, {"response": 1}), (True, *cut_to(10)))])
rows("fits_any", lambda words: fits("--max_len 0 " + words, ELEVEN, 9, 5),
    [((more,), (True, *cut_to(11))) for more in ("", "--truncation drop", "--truncation cut_both")])
rows("fits_least", lambda most: fits(f"--max_len {most}", TEN[:3], 1)[0], [((1,), False), ((2,), False), ((3,), False), ((4,), True)])

# ---- what is kept and counted ----


def kept(words, *documents, unknown=None, labels=False):
    maker, drafts = Maker(words, Folder(unknown=unknown)), [draft(*one) for one in documents]
    for one in drafts:
        one.labels = [] if labels else None
    result = maker.keep(drafts)
    return result, [list(one.mask) for one in drafts], {key: int(n) for key, n in maker.counts.items() if n}


ONE = ([5, 6, 7], [1, 1, 1], 1)
rows("keep", kept, [
    (("", ONE), (True, [[0, 1, 1]], {"read": 1, "supervised": 2, "kept": 1})),
    (("", ([], [], 0)), (False, [[]], {"read": 1, "zero_length": 1})),
    (("", ([5], [1], 0)), (True, [[0]], {"read": 1, "fully_masked": 1, "kept": 1})),
    (("--kind prompts", ([5], [0], 1)), (True, [[0]], {"read": 1, "kept": 1})),
    (("--max_len 2 --truncation drop", ONE), (False, [[1, 1, 1]], {"read": 1, "dropped_long": 1})),
    (("--max_len 2 --truncation drop", ([5, 6], [1, 1], 0)), (True, [[0, 1]], {"read": 1, "supervised": 1, "kept": 1})),
    (("--max_len 2", ([5, 6, 7], [1, 1, 1], 0)), (True, [[0, 1]], {"read": 1, "supervised": 1, "cut": 1, "kept": 1})),
    (("--kind pairs", ONE, ([5, 6], [1, 1], 1)), (True, [[0, 1, 1], [0, 1]], {"read": 1, "supervised": 3, "kept": 1})),
    (("--kind pairs", ONE, ONE), (True, [[0, 1, 1]] * 2, {"read": 1, "supervised": 4, "kept": 1, "identical": 1})),
    (("--kind pairs", ONE, ([4, 6, 7], [1, 1, 1], 1)), (True, [[0, 1, 1]] * 2, {"read": 1, "supervised": 4, "kept": 1, "two_prompts": 1})),
    (("--kind pairs", ONE, ([5, 6, 7], [1, 1, 1], 2)), (True, [[0, 1, 1]] * 2,
     {"read": 1, "supervised": 4, "kept": 1, "identical": 1, "two_prompts": 1})),
    (("--kind pairs", ONE, ([], [], 0)), (False, [[1, 1, 1], []], {"read": 1, "zero_length": 1})),
    (("--kind pairs", ([], [], 0), ONE), (False, [[], [1, 1, 1]], {"read": 1, "zero_length": 1})),
    (("--kind pairs --max_len 2 --truncation drop", ONE, ([5], [1], 0)), (False, [[1, 1, 1], [1]], {"read": 1, "dropped_long": 1})),
    (("--kind pairs --max_len 2 --truncation drop", ([5], [1], 0), ONE), (False, [[1], [1, 1, 1]], {"read": 1, "dropped_long": 1})),
    (("--kind pairs --max_len 4 --truncation cut_both", ([5, 6, 7], [0, 0, 1], 2), ([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], 2)),
     (True, [[0, 0, 1], [0, 0, 1, 1]], {"read": 1, "supervised": 3, "cut": 1, "kept": 1}))])
rows("keep_unknown", lambda unknown: kept("--kind pairs", ONE, ([5, 8], [1, 1], 1), unknown=unknown)[2].get("unknown", 0),
    [((None,), 0), ((9,), 0), ((7,), 1), ((8,), 1), ((5,), 2)])
rows("keep_unknown_0", lambda: kept("", ([0, 5], [1, 1], 0), unknown=0)[2].get("unknown", 0), [((), 1)])
rows("keep_steps", lambda: kept("", ([5, 6], [1, 1], 0), labels=True), [((), (True, [[1, 1]], {"read": 1, "supervised": 2, "kept": 1}))])


def batch(words, *records, folder=None, infos=None, before=None):
    """What becomes of records in one batch, the sections as numbers."""
    maker = Maker(words, folder, infos)
    maker.counts.update(before or {})
    made, counts = maker.batch([("f", i + 1, record, 0) for i, record in enumerate(records)])
    return {name: list(array.array("i", data)) if name == token_file.IDS else list(data) for name, data in made.items()}, {key: int(n) for key,
        n in counts.items() if n}


def sections(ids, mask, **more):
    return {token_file.IDS: [i for one in ids for i in one], token_file.MASK: [i for one in mask for i in one],
        token_file.OFFSETS: [len(one) for one in ids], **more}


AT = {"input": "a"}
rows("batch", batch, [
    (("", AT, {"input": ""}), (sections([[1, 97, 2]], [[0, 1, 1]]), {"read": 2, "supervised": 2, "kept": 1, "zero_length": 1})),
    (("", AT, b'{"input": "bc"}'), (sections([[1, 97, 2], [1, 98, 99, 2]], [[0, 1, 1], [0, 1, 1, 1]]),
     {"read": 2, "supervised": 5, "kept": 2})), (("",), (sections([], []), {})),
    (("", AT, {}), Sentence("f:2: no key \"input\"; set --input_key to one of those present: none")),
    (("", {}, AT), Sentence("f:1: no key \"input\"; set --input_key to one of those present: none")),
    (("", AT, {"input": "\ud800"}), Sentence(f"f:2: {HALF}"))])
rows("batch_ties", lambda: batch("--kind pairs", {"winner": "tie", "conversation_a": [], "conversation_b": []}, before={"kept": 5})[1],
    [((), {"read": 1, "ties": 1})])
rows("batch_lapsed", lambda: batch("", {"instruction": "i", "input": "", "output": None}, infos=[Info({}, "sft", False)])[1],
    [((), {"read": 1, "lapsed": 1})])
COMPLETION = [Info({"formatting": "completion", "columns": {"prompt": "t"}}, "sft", False)]
rows("batch_parted", lambda text: batch('--dataset_info [{"formatting":"completion"}] --max_len 3', {"t": text}, {"t": "z"}, infos=COMPLETION),
    [
    (("abcd",), (sections([[1, 97, 98], [99, 100, 2], [1, 122, 2]], [[0, 1, 1]] * 3), {"read": 3, "supervised": 6, "kept": 3})),
    (("abcde",), (sections([[1, 97, 98], [99, 100, 101], [1, 122, 2]], [[0, 1, 1]] * 3), {"read": 3, "supervised": 6, "kept": 3}))])


class Deep(Maker):
    def sft(self, record):
        raise record["why"]


def deep(why):
    Deep().batch([("f", 7, {"why": why}, 0)])


rows("batch_deep", deep, [((RecursionError("deep"),), Sentence("f:7: RecursionError deep")), ((MemoryError(),), Sentence("f:7: MemoryError")),
    ((base.Refused("no"),), Sentence("f:7: no"))])


def packed(kind, *kept):
    maker = Maker(f"--kind {kind}" + " --placeholder_token #" * (kind == "steps"))
    return maker.packed([([draft(*one) for one in drafts], more) for drafts, more in kept])


X, Y = ([5, 6], [0, 1]), ([7], [1])
IDS_XY = array.array("i", [5, 6, 7]).tobytes()
BASE = {token_file.IDS: IDS_XY, token_file.MASK: b"\0\1\1", token_file.OFFSETS: [2, 1]}
rows("packed", packed, [
    (("sft", ([X], None), ([Y], None)), BASE), (("pairs", ([X, Y], 0.5)), {**BASE, token_file.MARGINS: array.array("d", [0.5]).tobytes()}),
    (("labelled", ([X], 1), ([Y], 0)), {**BASE, token_file.LABELS: b"\1\0"}),
    (("prompts", ([X], ("p\u00e9", "1")), ([Y], ("q", "23"))),
     {**BASE, token_file.PROMPTS: "p\u00e9q".encode(), token_file.PROMPT_OFFSETS: [3, 1], token_file.ANSWERS: b"123", token_file.ANSWER_OFFSETS: [1, 2]})])


def packed_steps():
    maker, one = Maker("--kind steps --placeholder_token #"), draft(*X)
    one.labels = [(9, 0.5)]
    return maker.packed([([one], None)])


rows("packed_steps", packed_steps, [((), {token_file.IDS: array.array("i", [5, 6]).tobytes(), token_file.MASK: b"\0\1", token_file.OFFSETS: [2],
    token_file.TARGETS: array.array("i", [-100, 9]).tobytes(), token_file.SHARES: array.array("f", [0, 0.5]).tobytes()})])


def stream(before, text, after, whole=None):
    return list(array.array("i", Maker("", Folder(whole)).stream(("f", before, text, after))))


rows("stream", stream, [
    (("", "ab", ""), [97, 98]), (("", "ab", "c"), [97, 98]), (("z", "ab", "c"), [297, 298]), (("z", "ab", ""), [297, 298]),
    (("z", "ab", "c", {"za": 50}), [297, 298]), (("z", "ab", "c", {"bc": 50}), [297, 298]),
    (("z", "ab", "c", {"ab": 50}), [50]), (("z", "ab", "c", {"zabc": 50}), [297, 298]), (("zy", "ab", "cd", {"ya": 50, "bc": 51}), [297, 298]),
    (("", "ab", "c", {"bc": 50}), [97, 98])])


class Spaced(Letters):
    """Its first token stands for no character of the text."""

    def encoding(self, text):
        found = super().encoding(text)
        return Encoding([7, *found.ids], [(0, 0), *found.offsets])


def spaced():
    maker = Maker()
    maker.folder.fresh = Spaced()
    return list(array.array("i", maker.stream(("f", "", "ab", "c"))))


rows("stream_first", spaced, [((), [7, 97, 98])])
rows("once", lambda *pairs: base.once(list(pairs)), [
    ((("a", 1), ("b", 2)), {"a": 1, "b": 2}), ((), {}), ((("a", 1), ("b", 2), ("b", 3)),
     Sentence('key "b" occurs twice; remove one of them')),
    ((("a", 1), ("a", 2), ("b", 3)), Sentence('key "a" occurs twice; remove one of them'))])
rows("record_of", base.record_of, [((b'{"a": [1]}',), {"a": [1]}), (({"a": 1},), {"a": 1}),
    (([["x" * 80]],), Sentence(f'the record is [["{"x" * 37}, but an object {{...}} is needed')),
    ((5,), Sentence("the record is 5, but an object {...} is needed"))])
rows("little", lambda code, values: base.little(code, values),
    [(("i", [1, -2]), b"\1\0\0\0\xfe\xff\xff\xff"), (("Q", [3]), b"\3" + bytes(7)), (("d", iter([1.0])), b"\0\0\0\0\0\0\xf0?")])
rows("texts", lambda more: Draft(**more).texts(), [(({"text": "t", "prompt": "p"},), ["t"]), (({"text": ""},), [""]),
    (({"prompt": "p"},), ["p"]), (({"turns": [A, B]},), ["ab", "c", "d", "ef"])])
end()
