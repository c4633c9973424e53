# SPDX-License-Identifier: MIT OR Unlicense
"""Conversations as a model's own chat template writes them, and where the assistant speaks.

The template is Jinja, rendered as transformers does. Where it marks what the assistant says by
{% generation %}, two characters that no text holds stand around that in what is rendered.
Where it marks nothing, the conversation is rendered up to each answer and once more with it:
the difference is what the assistant says.
"""
import contextlib
import json
import os
import re
import signal
import threading
from .base import Refused, TooLong, reason
from .messages import called
from .model_folder import read_json

MARK_BEGIN, MARK_END = "\ufdd0", "\ufdd1"  # noncharacters: no text holds them
LONGEST = 60  # seconds that a template has for one text
TEMPLATE_FILES = ("chat_template.jinja, chat_template.json or a chat_template in "
                  "tokenizer_config.json")


def template_text(given, folder):
    if given is not None:
        if os.path.isfile(given):
            with open(given, encoding="utf-8") as file:
                return file.read()
        if "{" not in given:
            raise Refused(f"--tokenizer_chat_template is {given!r}, which is neither a file "
                          "nor a template; give one of them")
        return given
    path = os.path.join(folder.name, "chat_template.jinja")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    found = (read_json(folder.name, "chat_template.json").get("chat_template") or
             folder.config.get("chat_template"))
    if isinstance(found, list):  # several, each with a name
        named = (one.get("template") for one in found if one.get("name") == "default")
        found = next(named, None)
    if not isinstance(found, str):
        raise Refused(f"{folder.name} has no chat template ({TEMPLATE_FILES}); give one by "
                      "--tokenizer_chat_template, or leave out --apply_chat_template and shape "
                      "prompts by --input_template")
    return found


def template_environment(now):
    """The one that transformers has; {% generation %} leaves marks in the text."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller):
            return MARK_BEGIN + caller() + MARK_END

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                          separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


@contextlib.contextmanager
def limited(seconds):
    """For a thread that signals interrupt, which is the first."""
    def ended(number, frame):
        raise TooLong(f"the chat template takes more than {seconds} seconds for one text; give "
                      "another by --tokenizer_chat_template")
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Template:
    def __init__(self, text, folder, now):
        import jinja2
        self.error = jinja2.exceptions.TemplateError
        self.special = folder.special
        self.stops = tuple(folder.word[i].decode(errors="replace")
                           for i in folder.stops if i < folder.vocab)
        self.marked = re.search(r"{%-?\s*generation\s*-?%}", text) is not None
        try:
            self.template = template_environment(now).from_string(text)
            # as they are, each rendering walks through two of them
            self.template.globals = dict(self.template.globals)
        except Exception as why:  # a template may hold any constant arithmetic
            raise Refused(f"the chat template is not valid Jinja: {reason(why)}; check "
                          "--tokenizer_chat_template or the folder's own")

    def marks(self, messages, tools, prompt):
        try:
            with limited(LONGEST):
                return self.template.render(messages=messages, tools=tools, documents=None,
                                            add_generation_prompt=prompt, **self.special)
        except TooLong:
            raise
        except Exception as why:  # whatever a template can do
            said = why if isinstance(why, self.error) else reason(why)
            raise Refused(f"the chat template does not take these {len(messages)} messages: "
                          f"{said}; change them, or give another template by "
                          "--tokenizer_chat_template")

    def render(self, messages, tools=None, prompt=False):
        text = self.marks(messages, tools, prompt)
        return text.replace(MARK_BEGIN, "").replace(MARK_END, "") if self.marked else text

    def rendered(self, messages, tools):
        try:
            return self.render(messages, tools)
        except TooLong:
            raise
        except Refused:
            return None

    def settled(self, messages, tools):
        """The same messages, with null for the text beside a tool call if the template takes
        it, otherwise with an empty one. What a template does not write would not be learnt:
        refused."""
        names = [name for message in messages for name in called(message)]
        if not names:
            return messages
        hollow = [{**message, "content": message["content"] or ""} for message in messages]
        silent = [{key: value for key, value in message.items()
                   if key not in ("tool_calls", "function_call")} for message in hollow]
        bare, empty = self.rendered(silent, tools) or "", self.rendered(hollow, tools)
        for tried, text in ((messages, self.rendered(messages, tools)), (hollow, empty)):
            written = text is not None and all(
                text.count(name) - bare.count(name) >= names.count(name) for name in names)
            least = text if empty is None else empty
            if written and text.count("None") <= least.count("None"):
                return tried
        raise Refused(f"the chat template does not write the tool call {names[0]!r}; give a "
                      "template that does by --tokenizer_chat_template, or remove the record")

    def ended(self, text, begin):
        """Where a turn ends that begins there: with its stop token, which nothing is sampled
        behind."""
        bare = text.rstrip()
        return len(bare) if len(bare) > begin and bare.endswith(self.stops) else len(text)

    def turns(self, messages, tools, last):
        """The text of a conversation, and where the assistant speaks in it."""
        which = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if not which:
            raise Refused(f"none of the {len(messages)} messages is the assistant's, so there "
                          "is nothing to learn; add one, remove the record "
                          "or take --train_on all")
        if self.marked:
            return self.turns_by_marks(messages, tools, which, last)
        return self.turns_by_prefixes(messages, tools, which[-1:] if last else which)

    def turns_by_marks(self, messages, tools, which, last):
        text, spans, at = "", [], 0
        marked = self.marks(messages, tools, False)
        for piece in re.split(f"([{MARK_BEGIN}{MARK_END}])", marked):
            if piece == MARK_BEGIN:
                at = len(text)
            elif piece == MARK_END:
                spans.append((at, len(text)))
            else:
                text += piece
        if last:
            spans = spans[self.marks(messages[:which[-1]], tools, False).count(MARK_END):]
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise Refused("the chat template's {% generation %} marks nothing in this "
                          "conversation; put it around what the assistant says")
        return text, spans

    def turns_by_prefixes(self, messages, tools, which):
        text, spans = self.render(messages, tools), []
        for k in which:
            before = self.render(messages[:k], tools, True)
            after = text if k + 1 == len(messages) else self.render(messages[:k + 1], tools)
            if not (text.startswith(after) and after.startswith(before) and
                    len(before) < len(after)):
                raise Refused("the chat template writes the conversation up to message "
                              f"{k + 1} differently alone than as part of the whole, so "
                              "what the assistant says there cannot be found; put "
                              "{% generation %} and {% endgeneration %} around it in a "
                              "template for --tokenizer_chat_template, or take --train_on last "
                              "or all")
            span = (len(before), self.ended(after, len(before)))
            said = messages[k].get("content")
            if isinstance(said, str) and said.strip() not in text[span[0]:span[1]]:
                raise Refused("the chat template leaves out or changes what the assistant says "
                              f"in message {k + 1} ({said.strip()[:40]!r} became "
                              f"{text[span[0]:span[1]][:40]!r}); change the message, or mark "
                              "what is learnt by {% generation %} in a template for "
                              "--tokenizer_chat_template")
            spans.append(span)
        return text, spans

    def stops_turns(self):
        """Does a turn end in a token that sampling stops at?"""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text, spans = self.turns(messages, None, True)
        except Refused:
            return True  # it is for other conversations
        return text[:spans[-1][1]].rstrip().endswith(self.stops)
