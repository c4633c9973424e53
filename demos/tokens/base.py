# SPDX-License-Identifier: MIT OR Unlicense
"""What all modules stand on: the sentence of a refusal, JSON read strictly, numbers as bytes.

Input that is wrong raises Refused with one sentence. Who knows more than who raised it, such as
the file and the line, raises it again with that before it.
"""
import array
import collections
import json
import sys

ALL_SAMPLES = 100000000  # where no option says how many


class Refused(Exception):
    """One sentence: what is wrong, with the values, and the fix."""


class TooLong(Refused):
    """A template that does not end."""


def shown(why):
    """Without characters that would move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode()
                   for c in str(why))


def reason(why):
    return f"{type(why).__name__} {why}".strip()


def once(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        times = collections.Counter(key for key, _ in pairs)
        twice = next(key for key, n in times.items() if n > 1)
        raise Refused(f"key \"{twice}\" occurs twice; remove one of them")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=once)


def json_of(raw, wanted):
    try:
        return DECODER.decode(raw.decode())
    except UnicodeDecodeError as why:
        raise Refused(f"byte {why.start} is not UTF-8; convert the file to UTF-8")
    except ValueError as why:
        raise Refused(f"broken JSON ({why}); {wanted} is needed")
    except RecursionError:
        raise Refused("broken JSON (lists or objects lie too deep in each other); remove it")


def record_of(payload):
    if isinstance(payload, bytes):
        payload = json_of(payload, "one whole object {...} per line")
    if not isinstance(payload, dict):
        raise Refused(f"the record is {json.dumps(payload)[:40]}, but an "
                      "object {...} is needed")
    return payload


def little(code, values):
    numbers = array.array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
