# SPDX-License-Identifier: MIT OR Unlicense
"""Data sets that LLaMA-Factory's dataset_info.json describes, or a yaml file of axolotl.

An Info turns a record into one with the keys that Reader knows: messages, chosen, rejected and
label, or text. It reads as the origin does, and leaves out the records that the origin leaves
out.
"""
import json
from .base import ALL_SAMPLES, Refused

COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": None,
           "messages": "conversations", "system": None, "tools": None, "chosen": None,
           "rejected": None, "kto_tag": None}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
        "observation_tag": "observation", "function_tag": "function_call",
        "system_tag": "system"}
FORMATS = ("alpaca", "sharegpt", "openai", "messages", "completion")
ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"],
         "tool": ["tool"]}


class Lapsed(Exception):
    """A record that LLaMA-Factory leaves out, too."""


class Info:
    """Records of one set, as messages: what LLaMA-Factory reads of them, or axolotl (the
    formats messages and completion)."""

    def __init__(self, said, kind, plain):
        self.format = said.get("formatting", "alpaca")
        self.most = said.get("max_samples", ALL_SAMPLES)
        self.columns, self.tags = COLUMNS, TAGS
        if "columns" in said:  # those that are not named are not there
            self.columns = {**dict.fromkeys(COLUMNS), **said["columns"]}
        if "tags" in said:
            self.tags = {**dict.fromkeys(TAGS), **said["tags"]}
        self.kind, self.plain, self.blocks = kind, plain, bool(said.get("blocks"))
        if self.format == "messages":
            self.tags = {"role_tag": "role", "content_tag": "content", **said.get("tags", {})}
            self.roles = {word: role for role, words in said.get("roles", ROLES).items()
                          for word in words}
        if self.format not in FORMATS:
            raise Refused(f"--dataset_info has the formatting {self.format!r}; "
                          f"{', '.join(FORMATS)} are known")

    def column(self, record, name, needed=True):
        key = self.columns[name]
        if not key:
            return None
        if key not in record and needed:
            raise Refused(f"no key \"{key}\", which dataset_info has as {name}; keys: "
                          f"{', '.join(map(repr, record)) or 'none'}")
        return record.get(key)

    def text(self, record, name):
        found = self.column(record, name)
        if found is not None and not isinstance(found, str):
            raise Refused(f"\"{self.columns[name]}\" is {json.dumps(found)[:40]}, "
                          "but text is needed")
        return found or ""

    def message(self, said, where):
        role_key, content_key = self.tags["role_tag"], self.tags["content_tag"]
        if isinstance(said, dict) and (said.get("tool_calls") or said.get("train") is False or
                                       said.get("training") is False):
            raise Refused(f"{where} calls a tool or is not learnt, which is not supported; "
                          "remove it, or the record")
        if (not isinstance(said, dict) or role_key not in said or
                not isinstance(said.get(content_key), str)):
            raise Refused(f"{where} is {json.dumps(said)[:60]}, but an object with "
                          f"\"{role_key}\" and text as \"{content_key}\" is needed")
        speaker = said[role_key]
        if self.format == "messages":
            return {"role": self.roles.get(speaker, speaker), "content": said[content_key]}
        roles = {self.tags[f"{role}_tag"]: role
                 for role in ("user", "assistant", "observation", "function", "system")}
        return {"role": roles.get(speaker, "?"), "content": said[content_key]}

    def alpaca(self, record):
        history = self.column(record, "history") or []
        if not (isinstance(history, list) and
                all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
            raise Refused(f"\"{self.columns['history']}\" is {json.dumps(history)[:40]}, but a "
                          "list of [prompt, response] is needed")
        asked = (self.text(record, "prompt"), self.text(record, "query"))
        turns = [turn for pair in history for turn in zip(("user", "assistant"), pair)]
        turns.append(("user", "\n".join(filter(None, asked))))
        messages = [{"role": role, "content": said or ""} for role, said in turns]
        return self.text(record, "system"), messages

    def shared(self, record):
        key, said = self.columns["messages"], self.column(record, "messages")
        if not isinstance(said, list):
            raise Refused(f"\"{key}\" is {json.dumps(said)[:40]}, but a list "
                          "of messages is needed")
        turns = [self.message(one, f"\"{key}\"[{i}]") for i, one in enumerate(said)]
        if turns and turns[0]["role"] == "system" and self.format != "messages":
            return turns[0]["content"], turns[1:]
        return self.text(record, "system"), turns

    def conversed(self, record, turns):
        """A conversation as it is, of axolotl."""
        made = {"messages": turns}
        if self.kind == "pairs":
            for side in ("chosen", "rejected"):
                made[side] = turns + self.answer(record, side)
        if self.kind == "labelled":
            made["label"] = self.column(record, "kto_tag")
        return made

    def answer(self, record, name):
        said = self.column(record, name)
        if self.format == "alpaca":
            return [{"role": "assistant", "content": self.text(record, name)}]
        return [self.message(said, f"\"{self.columns[name]}\"")]

    def converted(self, record):
        """The record with the keys that Reader knows."""
        if self.column(record, "tools", False) not in (None, "", [], "[]"):
            raise Refused("it has tools, which --template does not write; "
                          "remove them, or the record")
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
        asks = self.kind == "pairs" or (self.kind == "prompts" and len(turns) % 2)
        ends = "user" if asks else "assistant"
        for i, turn in enumerate(turns):
            if turn["role"] not in (("user", "observation"), ("assistant", "function"))[i % 2]:
                raise Lapsed
        if not turns or (turns[-1]["role"] in ("user", "observation")) != (ends == "user"):
            raise Lapsed
        if self.kind == "prompts" and ends == "assistant":
            turns = turns[:-1]
        first = [{"role": "system", "content": system}] if system else []
        return self.conversed(record, first + turns)


def infos_of(o):
    """One for each set."""
    try:
        said = json.loads(o.dataset_info)
    except ValueError as why:
        raise Refused(f"--dataset_info is not JSON: {why}; give a list with "
                      "an object for each set")
    sets = len(o.dataset.split(","))
    listed = isinstance(said, list)
    if not listed or not all(isinstance(one, dict) for one in said) or len(said) != sets:
        raise Refused(f"--dataset_info has {len(said) if listed else 'no list of'} objects for "
                      f"{sets} data sets; give one for each")
    return [Info(one, o.kind, o.pretrain_mode) for one in said]
