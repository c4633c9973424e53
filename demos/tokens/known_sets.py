# SPDX-License-Identifier: MIT OR Unlicense
"""Data sets that OpenRLHF 0.2 knew by the keys of their records.

Its commands name no keys for them, so that a record says by its own keys which set it is of. A
function takes a record and gives the set's name with what the record says, or None.
"""
import json
import math
from .base import Refused
from .messages import message_of


class LeftOut(Exception):
    """A record that says nothing about which of two answers is the better one."""


# A prompt stands in this form, unless --input_template says otherwise; those of full-hh-rlhf
# and oasst1 hold their speakers already.
FORM_OF_SETS = "Human: {}\nAssistant: "


def spoken(record):
    """A prompt that names its speakers: its set and its text; None: there is none."""
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        return None
    if prompt.startswith("prompter:"):
        turns = prompt.replace("prompter:", "\nHuman: ").replace("assistant:", "\nAssistant: ")
        return "tasksource/oasst1_pairwise_rlhf_reward", turns + "\nAssistant: "
    return ("Dahoas/full-hh-rlhf", prompt) if prompt.rstrip().endswith("Assistant:") else None


def as_lines(conversation, form, key):
    """A conversation as text: what the user says in the form, what the assistant says on the
    next line."""
    if not isinstance(conversation, list):
        raise Refused(f"\"{key}\" is {json.dumps(conversation)[:40]}, but a list "
                      "of messages is needed")
    turns = [message_of(turn, f"\"{key}\"[{i}]") for i, turn in enumerate(conversation)]
    return "\n".join(
        form.replace("{}", turn["content"]) if turn["role"] == "user" else turn["content"]
        for turn in turns)


def question_of(record):
    question = record.get("question")
    return question.get("full_text") if isinstance(question, dict) else None


def orca(record):
    keys = ("system_prompt", "question", "response")
    return all(isinstance(record.get(key), str) for key in keys)


def arena_pair(record, form):
    if record.get("winner") not in ("model_a", "model_b"):
        raise LeftOut
    order = "ab" if record["winner"] == "model_a" else "ba"
    keys = [f"conversation_{side}" for side in order]
    sides = [as_lines(record[key], form, key) for key in keys]
    return "lmsys/chatbot_arena_conversations", None, sides


def webgpt_pair(record, form):
    scores = [record.get("score_0"), record.get("score_1")]
    answers = [record.get("answer_0"), record.get("answer_1")]
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in scores):
        raise Refused(f"\"score_0\" and \"score_1\" are {json.dumps(scores)[:40]}, but "
                      "two numbers are needed")
    if scores[0] == scores[1]:
        raise LeftOut
    sides = answers if scores[0] > scores[1] else answers[::-1]
    return "openai/webgpt_comparisons", form.replace("{}", question_of(record)), sides


def known_pair(record, form):
    """Its set, the prompt (None: the answers hold it) and both answers, the better one first;
    None: of no known set."""
    if "winner" in record and "conversation_a" in record and "conversation_b" in record:
        return arena_pair(record, form)
    answers = (record.get("answer_0"), record.get("answer_1"))
    if question_of(record) and all(isinstance(answer, str) for answer in answers):
        return webgpt_pair(record, form)
    found = spoken(record) if "chosen" in record and "rejected" in record else None
    return found and (*found, [record["chosen"], record["rejected"]])


def known_prompt(record, form):
    """Its set and the prompt; None: of no known set."""
    if orca(record):
        asked = record["system_prompt"] + "\n" + record["question"]
        return "Open-Orca/OpenOrca", form.replace("{}", asked)
    if "winner" in record and isinstance(record.get("conversation_a"), list):
        asked = as_lines(record["conversation_a"][:-1], form, "conversation_a")
        return "lmsys/chatbot_arena_conversations", asked
    if question_of(record) and "answer_1" in record:
        return "openai/webgpt_comparisons", form.replace("{}", question_of(record))
    return spoken(record)
