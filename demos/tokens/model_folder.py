# SPDX-License-Identifier: MIT OR Unlicense
"""A model's folder: its tokenizer, and what the files beside it say of its use.

The tokenizer is there twice: for a text that begins, and for one that goes on, before which no
space is put. The table of words, the bytes of every id, goes into the token file, so that the
trainers show texts without the tokenizer.
"""
import json
import os
import re
import zlib
from .base import Refused, reason

MOST_WORDS = 1 << 24  # ids are below it; as SEQPAR_MAX_VOCAB


def read_json(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as why:
        raise Refused(f"{path} cannot be read: {why}; download it again")
    if not isinstance(found, dict):
        raise Refused(f"{path} is not a JSON object; download it again")
    return found


def read_tokenizer(folder):
    path = os.path.join(folder, "tokenizer.json")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as why:
        others = [name for name in ("tokenizer.model", "vocab.json")
                  if os.path.exists(os.path.join(folder, name))]
        if others:
            raise Refused(f"{folder} has {others[0]}, but no tokenizer.json, which is "
                          "needed; make one: python3 -c \"from transformers import "
                          "AutoTokenizer "
                          f"as A; A.from_pretrained('{folder}').save_pretrained('{folder}')\"")
        raise Refused(f"{path} cannot be read: {why.strerror}; give the folder of a model with "
                      "its tokenizer as --pretrain")


def parts(node):
    """A normalizer, pre-tokenizer or decoder, and those that it is a sequence of."""
    if not isinstance(node, dict):
        return []
    keys = ("normalizers", "pretokenizers", "decoders")
    inner = next((node[key] for key in keys if key in node), [])
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
    """What a token of the model's own vocabulary stands for, as bytes: a function of its
    text."""
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
        # Strip: of the first token of a text
        elif part["type"] not in ("Sequence", "Fuse", "Strip"):
            raise Refused(f"tokenizer.json has a decoder {part['type']}, which is not "
                          "supported; ByteLevel, Metaspace, Replace, "
                          "ByteFallback, Fuse and Strip are")
    if not (by_byte or replaced or fallback):
        raise Refused("tokenizer.json has no decoder, so nothing says which text a token "
                      "stands for; take a tokenizer that has one")
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
            self.going_on, bare = self.fresh, without_prefix(self.json)
            if bare != self.json:
                self.going_on = tokenizers.Tokenizer.from_str(json.dumps(bare))
        except Exception as why:  # the package raises plain Exception
            raise Refused(f"{folder}/tokenizer.json cannot be read by tokenizers "
                          f"{tokenizers.__version__}: {why}; pip install -U tokenizers, "
                          "or download the file again")
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
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError,
                RecursionError) as why:
            raise Refused(f"{folder}/tokenizer.json or a file beside it is damaged: "
                          f"{reason(why)}; download them again")

    def special_texts(self):
        """bos_token, eos_token and so on, as templates know them."""
        texts = {}
        for source in (read_json(self.name, "special_tokens_map.json"), self.config):
            texts.update({key: token_text(value) for key, value in source.items()
                          if key.endswith("_token") and isinstance(token_text(value), str)})
        for key in ("bos_token", "eos_token"):
            ids = [first_id(source.get(f"{key}_id"))
                   for source in (self.model, self.generation)]
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
        self.bos, self.eos, self.pad = (self.id_of(f"{name}_token")
                                        for name in ("bos", "eos", "pad"))
        if self.eos < 0:
            raise Refused(f"{self.name} names no eos_token that its tokenizer has (it says "
                          f"{self.special.get('eos_token')!r}); name it in "
                          "tokenizer_config.json")
        listed = self.generation.get("eos_token_id", [])
        listed = listed if isinstance(listed, list) else [listed]
        listed = [i for i in listed if i is not None and i != self.eos]
        there = (i for i in listed if self.token_of(i) is not None)
        self.stops = [self.eos, *dict.fromkeys(there)]
        self.nothing = [i for i in listed if self.token_of(i) is None]
        # what the post-processor puts before a text; what it puts behind is EOS, which stands
        # where a response ends
        bare, whole = (self.fresh.encode("a", add_special_tokens=special).ids
                       for special in (False, True))
        at = next((i for i in range(len(whole) + 1) if whole[i:i + len(bare)] == bare), 0)
        self.prefix = whole[:at]

    def end_with(self, token, why):
        """From now on texts end with this token, which must be one that no text is split
        into."""
        tokens = self.json.get("added_tokens") or []
        added = next((one["id"] for one in tokens if one["content"] == token), None)
        if added is None:
            raise Refused(f"{why} ends a turn with {token}, but "
                          f"{self.name}/tokenizer.json lacks it among its added_tokens; give "
                          "the template that the model was made for, or a "
                          "model that has the token")
        self.eos, self.stops = added, list(dict.fromkeys([added, *self.stops]))
        self.special["eos_token"] = token

    def words(self):
        """The table id -> bytes. Added tokens stand for themselves."""
        vocabulary, word = self.fresh.get_vocab(True), decoder_of(self.json)
        self.vocab = max(vocabulary.values()) + 1
        if self.vocab > MOST_WORDS:
            raise Refused(f"{self.name}/tokenizer.json has a token with the id "
                          f"{self.vocab - 1}, but the largest possible one is "
                          f"{MOST_WORDS - 1}; download the file again")
        self.word, self.flags = [b""] * self.vocab, bytearray(self.vocab)
        for token, i in vocabulary.items():
            self.word[i] = word(token)
        for added in self.json.get("added_tokens") or []:
            if not 0 <= added["id"] < self.vocab:
                raise Refused(f"{self.name}/tokenizer.json gives {added['content']!r} the id "
                              f"{added['id']}, but its vocabulary ends at "
                              f"{self.vocab - 1}; download the file again")
            self.word[added["id"]] = added["content"].encode()
            self.flags[added["id"]] = bool(added.get("special"))
        named = self.json["model"].get("unk_token")
        self.unknown = self.json["model"].get("unk_id")
        if named is not None:
            self.unknown = self.fresh.token_to_id(named)

    def notices(self):
        if self.nothing:
            yield (f"generation_config.json has {self.nothing} among its eos_token_id, which "
                   "no token has; left out")
        wanted = self.config.get("add_bos_token")
        if isinstance(wanted, bool) and self.bos >= 0 and wanted != (self.bos in self.prefix):
            yield (f"tokenizer_config.json says add_bos_token {str(wanted).lower()}, "
                   f"tokenizer.json puts {self.prefix} before a text; "
                   "tokenizer.json is followed")
