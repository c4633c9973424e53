# SPDX-License-Identifier: MIT OR Unlicense
"""What a record says: its messages, in the forms that data sets have.

Every form becomes a list of {"role", "content"}: ShareGPT's {"from", "value"}, Alpaca's
instruction with a history, content in parts, calls of functions. What cannot be written as text
is refused, never left out.
"""
import json
from .base import Refused

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


# in ShareGPT
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
            "system": "system", "function_call": "assistant", "observation": "tool",
            "tool": "tool"}


def shared_gpt(message, where):
    """{"from", "value"} as {"role", "content"}."""
    speaker, said = message["from"], message.get("value")
    if speaker not in SPEAKERS:
        raise Refused(f"{where} is from {json.dumps(speaker)[:40]}; "
                      f"{', '.join(SPEAKERS)} are known")
    more = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**more, "role": SPEAKERS[speaker], "content": said}
    try:
        calls = json.loads(said)
    except (TypeError, ValueError):
        raise Refused(f"{where} is from function_call, but its value is not JSON: "
                      f"{json.dumps(said)[:60]}")
    calls = [{"type": "function", "function": call}
             for call in (calls if isinstance(calls, list) else [calls])]
    return {**more, "role": "assistant", "content": None, "tool_calls": calls}


def called(message):
    """The functions that a message calls."""
    calls = message.get("tool_calls") or []
    calls = list(calls) if isinstance(calls, list) else [calls]
    calls += filter(None, [message.get("function_call")])
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Refused(f"a tool call is {json.dumps(calls)[:60]}, but it is an object with "
                      "\"name\" and \"arguments\"")
    return [call["name"] for call in calls]


def is_text(part):
    return (isinstance(part, dict) and part.get("type") == "text" and
            isinstance(part.get("text"), str))


def content_of(message, where):
    """Text; null beside a tool call. Parts of text are joined."""
    said = message.get("content")
    if said is None and called(message):
        return None
    if isinstance(said, list):
        other = next((part for part in said if not is_text(part)), None)
        if other is not None:
            raise Refused(f"{where} has a part {json.dumps(other)[:60]}, but only parts of "
                          "type text can be read; remove it")
        return "".join(part["text"] for part in said)
    if not isinstance(said, str):
        raise Refused(f"{where} has the content {json.dumps(said)[:40]}, but text is needed; "
                      "fill it or remove the record")
    return said


def message_of(message, where):
    keys = message if isinstance(message, dict) else {}
    if isinstance(keys.get("from"), str) and "role" not in keys:
        message = shared_gpt(message, where)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{where} is {json.dumps(message)[:60]}, but a message is an object with "
                      "\"role\" and \"content\"")
    # .parquet has a null for each absent key
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("weight", "train", "training"):
        if key in message and message[key] != 1:
            raise Refused(f"{where} has \"{key}\": {json.dumps(message[key])}, which says that "
                          "it is not learnt; that is not supported: end the conversation "
                          "before it, or leave the key out")
    return {**message, "content": content_of(message, where)}


def alpaca_before(record):
    """What stands before its instruction: the system's text and what was said before."""
    first, past = record.get("system"), record.get("history") or []
    if not (isinstance(past, list) and
            all(isinstance(pair, list) and len(pair) == 2 for pair in past)):
        raise Refused(f"\"history\" is {json.dumps(past)[:40]}, but a list of "
                      "[prompt, response] is needed")
    turns = [("system", first)] if first else []
    turns += [turn for pair in past for turn in zip(("user", "assistant"), pair)]
    return [message_of({"role": role, "content": said},
                       '"system"' if role == "system" else '"history"') for role, said in turns]


def tools_of(record):
    tools = record.get("tools")
    tools = tools.strip() if isinstance(tools, str) else tools
    if tools and isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            pass
    if tools and not isinstance(tools, list):
        raise Refused(f"\"tools\" is {json.dumps(tools)[:40]}, but a list "
                      "of functions is needed")
    return tools or None


def alike(one, other):
    said, again = ((message["content"] or "").strip() for message in (one, other))
    return one["role"] == other["role"] and said == again


def joined(shared, side, key):
    """A prompt and what goes on from it, which may begin with the prompt, or some of it, once
    more."""
    if side[0]["role"] == "assistant":
        return shared + side
    for n in range(min(len(shared), len(side)), 0, -1):
        if all(map(alike, shared[-n:], side)):
            return shared[:-n] + side
    if any(all(map(alike, shared, side[i:])) for i in range(len(side) - len(shared))):
        return side
    if shared[-1]["role"] == side[0]["role"] or side[0]["role"] == "system":
        raise Refused(f"\"{key}\" begins with a message of the {side[0]['role']}, "
                      f"{json.dumps(side[0]['content'], ensure_ascii=False)[:40]}, which is "
                      "not the prompt's "
                      f"{json.dumps(shared[-1]['content'], ensure_ascii=False)[:40]}; leave "
                      f"out the key of the prompt if \"{key}\" holds the whole conversation")
    return shared + side
