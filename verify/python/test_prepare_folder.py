# SPDX-License-Identifier: MIT OR Unlicense
"""What demos/prepare.py reads in a model's folder, case by case: its tokenizer, its special tokens and its chat template.

    test_prepare_folder.py FOLDER
"""
import signal
import threading
import time
import types
from prepare_tables import OUT, Sentence, end, rows, write
from tokens import base, chat_template, model_folder

MARK_BEGIN, MARK_END = "\ufdd0", "\ufdd1"

rows("shown", base.shown, [(("a \u00e9",), "a \u00e9"), (("\x1b[1m\n",), "\\x1b[1m\\n")])
rows("reason", base.reason, [((ValueError(),), "ValueError"), ((ValueError("x y"),), "ValueError x y")])

# ---- files ----

ANEW = "download it again"
for name, text in (("good", '{"a": 1}'), ("list", "[1]"), ("broken", "{")):
    write(f"json/{name}.json", text)
AT = f"{OUT}/json"
rows("read_json", model_folder.read_json, [
    ((AT, "none.json"), {}),
    ((AT, "good.json"), {"a": 1}),
    ((AT, "list.json"), Sentence(f"{AT}/list.json is not a JSON object; {ANEW}")),
    ((AT, "broken.json"), Sentence(f"{AT}/broken.json cannot be read: Expecting property name enclosed in double quotes: line 1 column "
                                   f"2 (char 1); {ANEW}")),
])
for name in ("there/tokenizer.json", "model/tokenizer.model", "vocab/vocab.json", "both/vocab.json", "both/tokenizer.model", "nothing/x"):
    write(name, "{}")


def others(folder, name):
    return Sentence(f"{folder} has {name}, but no tokenizer.json, which is needed; make one: python3 -c \"from transformers import "
                    f"AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('{folder}')\"")


rows("read_tokenizer", model_folder.read_tokenizer, [
    ((f"{OUT}/there",), b"{}"),
    ((f"{OUT}/model",), others(f"{OUT}/model", "tokenizer.model")),
    ((f"{OUT}/both",), others(f"{OUT}/both", "tokenizer.model")),
    ((f"{OUT}/vocab",), others(f"{OUT}/vocab", "vocab.json")),
    ((f"{OUT}/nothing",), Sentence(f"{OUT}/nothing/tokenizer.json cannot be read: No such file or directory; give the folder of a model "
                                   "with its tokenizer as --pretrain")),
])

# ---- the parts of a tokenizer ----


def kind(name, **more):
    return {"type": name, **more}


def sequence(key, *inner):
    return {"type": "Sequence", key: list(inner)}


rows("parts", lambda node: [part["type"] for part in model_folder.parts(node)], [
    ((None,), []), (("x",), []), ((kind("A"),), ["A"]),
    ((sequence("normalizers", kind("A"), sequence("pretokenizers", kind("B"), kind("C"))),), ["Sequence", "A", "Sequence", "B", "C"]),
    ((sequence("decoders", kind("A"), kind("B")),), ["Sequence", "A", "B"]),
])
PREPEND, SPACES = kind("Prepend", prepend="_"), kind("Replace", pattern={"String": " "}, content="_")
META = kind("Metaspace", replacement="_", prepend_scheme="always", add_prefix_space=True)
NEVER = kind("Metaspace", replacement="_", prepend_scheme="never")
BYTES, NO_PREFIX = kind("ByteLevel", add_prefix_space=True), kind("ByteLevel", add_prefix_space=False)
SPLIT = kind("Split", pattern={"String": "x"})
rows("without_prefix", model_folder.without_prefix, [
    (({"normalizer": None, "pre_tokenizer": None},), {"normalizer": None, "pre_tokenizer": None}),
    (({"model": {}},), {"model": {}}),
    (({"normalizer": PREPEND},), {"normalizer": None}),
    (({"normalizer": SPACES},), {"normalizer": SPACES}),
    (({"normalizer": sequence("normalizers", PREPEND, SPACES)},), {"normalizer": sequence("normalizers", SPACES)}),
    (({"normalizer": sequence("normalizers", SPACES, sequence("normalizers", PREPEND, SPACES))},),
     {"normalizer": sequence("normalizers", SPACES, sequence("normalizers", SPACES))}),
    (({"pre_tokenizer": META},), {"pre_tokenizer": NEVER}),
    (({"pre_tokenizer": BYTES},), {"pre_tokenizer": NO_PREFIX}),
    (({"pre_tokenizer": kind("Digits")},), {"pre_tokenizer": kind("Digits")}),
    (({"normalizer": PREPEND, "pre_tokenizer": sequence("pretokenizers", SPLIT, META, BYTES)},),
     {"normalizer": None, "pre_tokenizer": sequence("pretokenizers", SPLIT, NEVER, NO_PREFIX)}),
])


def as_it_was():
    given = {"normalizer": dict(PREPEND), "pre_tokenizer": dict(META)}
    model_folder.without_prefix(given)
    return given


rows("without_prefix_of_another", as_it_was, [((), {"normalizer": PREPEND, "pre_tokenizer": META})])

TABLE = model_folder.byte_of_character()
rows("bytes", lambda character: TABLE[character], [
    ((character,), byte) for character, byte in (
        ("!", 33), ("~", 126), ("\u00a1", 161), ("\u00ac", 172), ("\u00ae", 174), ("\u00ff", 255), ("\u0100", 0), ("\u010a", 10),
        ("\u0120", 32), ("\u0121", 127), ("\u0142", 160), ("\u0143", 173))])
rows("every_byte", lambda: sorted(TABLE.values()), [((), list(range(256)))])
SAID = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip are"
NO_DECODER = Sentence("tokenizer.json has no decoder, so nothing says which text a token stands for; take a tokenizer that has one")
FALLBACK, REPLACE = kind("ByteFallback"), kind("Replace", pattern={"String": "_"}, content=" ")
LLAMA = sequence("decoders", REPLACE, FALLBACK, kind("Fuse"), kind("Strip"))
rows("decoder", lambda decoder, token: model_folder.decoder_of({"decoder": decoder})(token), [
    ((kind("ByteLevel"), "\u0120a"), b" a"), ((kind("ByteLevel"), "\u00c3\u00a9"), b"\xc3\xa9"),
    ((kind("ByteLevel"), "\u4f60"), "\u4f60".encode()), ((kind("ByteLevel"), "<0x0A>"), b"<0x0A>"),
    ((kind("Metaspace", replacement="_"), "_a_"), b" a "), ((kind("Metaspace", replacement="_"), "\u0120"), b"\xc4\xa0"),
    ((REPLACE, "a_b_"), b"a b "), ((REPLACE, "<0x0A>"), b"<0x0A>"),
    ((FALLBACK, "<0x0A>"), b"\n"), ((FALLBACK, "<0xE9>"), b"\xe9"), ((FALLBACK, "<0x0a>"), b"<0x0a>"),
    ((FALLBACK, "<0x0A>b"), b"<0x0A>b"), ((FALLBACK, "a_b"), b"a_b"),
    ((LLAMA, "_a"), b" a"), ((LLAMA, "<0x41>"), b"A"),
    ((None, "a"), NO_DECODER), ((sequence("decoders", kind("Fuse"), kind("Strip")), "a"), NO_DECODER),
    ((kind("WordPiece"), "a"), Sentence(f"tokenizer.json has a decoder WordPiece, which is not supported; {SAID}")),
    ((kind("Replace", pattern={"Regex": "_"}, content=" "), "a"),
     Sentence(f"tokenizer.json has a decoder Replace, which is not supported; {SAID}")),
])
rows("token_text", model_folder.token_text, [(("a",), "a"), (({"content": "b"},), "b"), (({},), None), ((None,), None)])
rows("first_id", model_folder.first_id, [((5,), 5), (([6, 7],), 6), (([],), []), ((None,), None)])

# ---- special tokens ----


class Fresh:
    """A tokenizer of words, each a token; what it puts around a text stands before and behind. turned: then it drops the text's last."""

    def __init__(self, words, before=(), behind=(), turned=False):
        self.words, self.before, self.behind, self.turned = words, list(before), list(behind), turned

    def id_to_token(self, i):
        return self.words[i] if i < len(self.words) else None

    def token_to_id(self, text):
        assert isinstance(text, str), text
        return self.words.index(text) if text in self.words else None

    def get_vocab(self, added):
        return {word: i for i, word in enumerate(self.words)} if added else {}

    def encode(self, text, add_special_tokens):
        ids = [self.words.index(text)] if text in self.words else []
        ids = ids[:-1] if self.turned and add_special_tokens else ids
        return types.SimpleNamespace(ids=self.before + ids + self.behind if add_special_tokens else ids)


class Told(model_folder.Folder):
    """What files of a folder say; its tokenizer has these words."""

    def __init__(self, fresh=None, config=None, generation=None, config_json=None, said=None, **more):
        self.name, self.fresh, self.config = f"{OUT}/{said or 'nothing'}", fresh or Fresh(["<s>", "</s>", "<e>", "a"]), config or {}
        self.generation, self.model = generation or {}, config_json or {}
        self.json = {"decoder": FALLBACK, "model": {}, **more}


write("said/special_tokens_map.json", '{"bos_token": "<m>", "pad_token": {"content": "<p>"}, "unk_token": [1], "x_tokens": "<x>"}')


def special(config, model, generation, said=None):
    return Told(config=config, config_json=model, generation=generation, said=said).special_texts()


rows("special_texts", special, [
    (({}, {}, {}), {}),
    (({"bos_token": "<b>", "eos_token": {"content": "<e>"}, "x": "y", "a_token": None}, {}, {}), {"bos_token": "<b>", "eos_token": "<e>"}),
    (({}, {}, {}, "said"), {"bos_token": "<m>", "pad_token": "<p>"}),
    (({"bos_token": "<b>"}, {"bos_token_id": 0}, {}, "said"), {"bos_token": "<b>", "pad_token": "<p>"}),
    (({}, {"bos_token_id": 0, "eos_token_id": [1, 2]}, {"eos_token_id": 2}), {"bos_token": "<s>", "eos_token": "</s>"}),
    (({}, {}, {"bos_token_id": 0, "eos_token_id": [2, 1]}), {"bos_token": "<s>", "eos_token": "<e>"}),
    (({}, {"eos_token_id": 9}, {"eos_token_id": 1}), {"eos_token": "</s>"}),
    (({"eos_token": "<e>"}, {"eos_token_id": 1, "pad_token_id": 0}, {}), {"eos_token": "<e>"}),
])
rows("token_of", lambda i: Told(Fresh(["<s>", "</s>"])).token_of(i), [
    ((0,), "<s>"), ((1,), "</s>"), ((2,), None), ((-1,), None), ((None,), None), (("a",), None), ((1 << 24,), None)])


class Every:
    def id_to_token(self, i):
        return f"<{i}>"


rows("token_of_last", lambda i: Told(Every()).token_of(i), [(((1 << 24) - 1,), "<16777215>"), ((1 << 24,), None), ((-1,), None)])


def ids_of(special, generation=None, fresh=None):
    folder = Told(fresh, generation=generation)
    folder.special = special
    folder.ids()
    return folder.bos, folder.eos, folder.pad, folder.stops, folder.nothing, folder.prefix


EOS = {"eos_token": "</s>"}
rows("ids", ids_of, [
    ((EOS,), (-1, 1, -1, [1], [], [])),
    (({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<e>"},), (0, 1, 2, [1], [], [])),
    (({"eos_token": "<s>", "pad_token": "none"},), (-1, 0, -1, [0], [], [])),
    ((EOS, {"eos_token_id": 2}), (-1, 1, -1, [1, 2], [], [])),
    ((EOS, {"eos_token_id": [2, 1, None, 0, 2, 9]}), (-1, 1, -1, [1, 2, 0], [9], [])),
    ((EOS, {}, Fresh(["<s>", "</s>", "a"], [0])), (-1, 1, -1, [1], [], [0])),
    ((EOS, {}, Fresh(["<s>", "</s>", "a"], [0, 0], [1])), (-1, 1, -1, [1], [], [0, 0])),
    ((EOS, {}, Fresh(["<s>", "</s>", "a"], [], [1])), (-1, 1, -1, [1], [], [])),
    ((EOS, {}, Fresh(["<s>", "</s>", "a"], [1], turned=True)), (-1, 1, -1, [1], [], [])),
    (({},), Sentence(f"{OUT}/nothing names no eos_token that its tokenizer has (it says None); name it in tokenizer_config.json")),
    (({"eos_token": "<x>"},), Sentence(f"{OUT}/nothing names no eos_token that its tokenizer has (it says '<x>'); name it in "
                                       "tokenizer_config.json")),
])


def ends(token, added, stops):
    folder = Told(added_tokens=added)
    folder.special, folder.eos, folder.stops = dict(EOS), 1, stops
    folder.end_with(token, "WHY")
    return folder.eos, folder.stops, folder.special["eos_token"]


ADDED = [{"id": 5, "content": "<a>"}, {"id": 0, "content": "<b>"}]
NOT_ADDED = Sentence(f"WHY ends a turn with </s>, but {OUT}/nothing/tokenizer.json lacks it among its added_tokens; give the "
                     "template that the model was made for, or a model that has the token")
rows("end_with", ends, [
    (("<a>", ADDED, [1, 2]), (5, [5, 1, 2], "<a>")), (("<b>", ADDED, [1, 0]), (0, [0, 1], "<b>")),
    (("</s>", ADDED, [1]), NOT_ADDED), (("</s>", None, [1]), NOT_ADDED)])


def words_of(fresh, **more):
    folder = Told(fresh, **more)
    folder.words()
    return folder.vocab, folder.word, list(folder.flags), folder.unknown


WORDS = Fresh(["<0x41>", "b", "c"])
rows("words", words_of, [((WORDS,), (3, [b"A", b"b", b"c"], [0, 0, 0], None))])
rows("words_added", lambda more: words_of(WORDS, **more), [
    (({"added_tokens": [{"id": 0, "content": "<0x41>", "special": True}, {"id": 2, "content": "C"}]},),
     (3, [b"<0x41>", b"b", b"C"], [1, 0, 0], None)),
    (({"added_tokens": [{"id": 1, "content": "B", "special": False}], "model": {"unk_token": "c"}},), (3, [b"A", b"B", b"c"], [0, 0, 0], 2)),
    (({"added_tokens": None, "model": {"unk_id": 1}},), (3, [b"A", b"b", b"c"], [0, 0, 0], 1)),
    (({"model": {"unk_token": "b", "unk_id": 2}},), (3, [b"A", b"b", b"c"], [0, 0, 0], 1)),
    *((({"added_tokens": [{"id": i, "content": "x"}]},), Sentence(f"{OUT}/nothing/tokenizer.json gives 'x' the id {i}, but its vocabulary "
                                                                  "ends at 2; download the file again")) for i in (-1, 3)),
])


def noticed(nothing, wanted, bos, prefix):
    folder = Told(config={} if wanted is None else {"add_bos_token": wanted})
    folder.nothing, folder.bos, folder.prefix = nothing, bos, prefix
    return list(folder.notices())


def bos_notice(wanted, prefix):
    return [f"tokenizer_config.json says add_bos_token {wanted}, tokenizer.json puts {prefix} before a text; tokenizer.json is followed"]


rows("folder_notices", noticed, [
    (([], None, 0, []), []), (([9], None, 0, [0]), ["generation_config.json has [9] among its eos_token_id, which no token has; left out"]),
    (([], True, 0, [0]), []), (([], False, 0, []), []), (([], True, 0, []), bos_notice("true", [])),
    (([], False, 0, [0]), bos_notice("false", [0])), (([], True, -1, []), []), (([], 1, 0, []), []), (([], False, 3, [2]), []),
    (([], True, 3, [2]), bos_notice("true", [2]))])

# ---- how long a template may take ----


def limits():
    before = signal.getsignal(signal.SIGALRM)
    with chat_template.limited(50):
        inside = signal.getsignal(signal.SIGALRM) != before, 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    return inside, signal.getsignal(signal.SIGALRM) == before, signal.getitimer(signal.ITIMER_REAL)


def endless(seconds):
    with chat_template.limited(seconds):
        time.sleep(20)


def of_another_thread():
    """No signal reaches it, so nothing is set."""
    found = []

    def work():
        with chat_template.limited(50):
            found.append(signal.getitimer(signal.ITIMER_REAL))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


rows("limited", limits, [((), ((True, True), True, (0.0, 0.0)))])
rows("limited_thread", of_another_thread, [((), [(0.0, 0.0)])])
rows("limited_end", endless, [((0.01,), Sentence("the chat template takes more than 0.01 seconds for one text; give another by --tokenizer_chat_template"))])

# ---- which chat template ----

write("jinja/chat_template.jinja", "{of a file}")
write("jsons/chat_template.json", '{"chat_template": "{of json}"}')
write("given.jinja", "as it is")


def template(given, folder="nothing", **config):
    return chat_template.template_text(given, types.SimpleNamespace(name=f"{OUT}/{folder}", config=config))


NO_TEMPLATE = Sentence(f"{OUT}/nothing has no chat template (chat_template.jinja, chat_template.json or a chat_template in "
                       "tokenizer_config.json); give one by --tokenizer_chat_template, or leave out --apply_chat_template and shape "
                       "prompts by --input_template")
rows("template_text", template, [
    (("{x}", "jinja"), "{x}"), ((f"{OUT}/given.jinja",), "as it is"), ((None, "jinja"), "{of a file}"), ((None, "jsons"), "{of json}"),
    (("x",), Sentence("--tokenizer_chat_template is 'x', which is neither a file nor a template; give one of them")),
    ((None,), NO_TEMPLATE)])
LISTED = [{"name": "other", "template": "{o}"}, {"name": "default", "template": "{d}"}, {"name": "last", "template": "{l}"}]
rows("template_of_config", lambda found: template(None, chat_template=found), [
    (("{c}",), "{c}"), ((LISTED,), "{d}"), ((LISTED[:1],), NO_TEMPLATE), (([],), NO_TEMPLATE), ((5,), NO_TEMPLATE)])
rows("template_of_json_first", lambda: template(None, "jsons", chat_template="{c}"), [((), "{of json}")])

# ---- chat templates: written here as functions, rendered by nobody else ----


class Written(chat_template.Template):
    """text(messages, tools, prompt) is the template."""

    def __init__(self, text, marked=False, stops=("<e>",)):
        self.error, self.special, self.stops, self.marked = ZeroDivisionError, {"bos_token": "<s>"}, stops, marked
        self.template = types.SimpleNamespace(render=lambda **given: text(given))


def user(said):
    return {"role": "user", "content": said}


def assistant(said, **more):
    return {"role": "assistant", "content": said, **more}


def turn_text(message):
    return f"<{message['role']}>{message['content']}<e>\n"


def plain(given):
    return "".join(map(turn_text, given["messages"])) + "<assistant>" * given["add_generation_prompt"]


def marking(given):
    return "".join(f"<assistant>{MARK_BEGIN}{m['content']}<e>{MARK_END}\n" if m["role"] == "assistant" else turn_text(m)
                   for m in given["messages"]) + "<assistant>" * given["add_generation_prompt"]


def everything(given):
    return repr(sorted(given.items()))


def wrong(given):
    raise given["tools"]


ONE = [user("q"), assistant("a")]
TWO = [*ONE, user("r"), assistant("b")]
DOES_NOT = "the chat template does not take these 2 messages: {}; change them, or give another template by --tokenizer_chat_template"
rows("marks", lambda text, tools, prompt: Written(text).marks(ONE, tools, prompt), [
    ((everything, [5], True), repr([("add_generation_prompt", True), ("bos_token", "<s>"), ("documents", None), ("messages", ONE),
                                    ("tools", [5])])),
    ((plain, None, True), "<user>q<e>\n<assistant>a<e>\n<assistant>"), ((plain, None, False), "<user>q<e>\n<assistant>a<e>\n"),
    ((wrong, ZeroDivisionError("by 0"), False), Sentence(DOES_NOT.format("by 0"))),
    ((wrong, KeyError("k"), False), Sentence(DOES_NOT.format("KeyError 'k'"))),
])
rows("render", lambda text, marked: Written(text, marked).render(ONE), [
    ((plain, False), "<user>q<e>\n<assistant>a<e>\n"), ((marking, True), "<user>q<e>\n<assistant>a<e>\n"),
    ((marking, False), f"<user>q<e>\n<assistant>{MARK_BEGIN}a<e>{MARK_END}\n")])


rows("render_all", lambda *given: Written(everything).render(*given), [
    ((ONE, [5], True), repr([("add_generation_prompt", True), ("bos_token", "<s>"), ("documents", None), ("messages", ONE), ("tools", [5])])),
    ((ONE,), repr([("add_generation_prompt", False), ("bos_token", "<s>"), ("documents", None), ("messages", ONE), ("tools", None)]))])


def too_long(given):
    raise base.TooLong("too long")


rows("rendered", lambda text, tools: Written(text).rendered(ONE, tools), [
    ((plain, None), "<user>q<e>\n<assistant>a<e>\n"), ((wrong, ValueError()), None), ((too_long, None), Sentence("too long"))])
rows("ended", lambda text, begin: Written(plain).ended(text, begin), [
    (("a<e>\n", 0), 4), (("a<e>\n", 3), 4), (("a<e>\n", 4), 5), (("a<x>\n", 0), 5), (("a<e>", 0), 4), (("a<e> b ", 0), 7)])

# what a call becomes
CALL = {"type": "function", "function": {"name": "add"}}


def calling(given):
    return "".join(f"[{m['content']}]" + "".join(c["function"]["name"] for c in m.get("tool_calls", [])) for m in given["messages"])


def of_null(given):
    return "".join((m["tool_calls"][0]["function"]["name"] if m["content"] is None else m["content"]) for m in given["messages"])


def of_text(given):
    return "".join(m["content"] + "".join(c["function"]["name"] for c in m.get("tool_calls", [])) for m in given["messages"])


def first_alone(given):
    return "add" * any("tool_calls" in m for m in given["messages"])


def listed(given):
    return "add" + given["messages"][0]["content"]


NULL, EMPTY = assistant(None, tool_calls=[CALL]), assistant("", tool_calls=[CALL])
SILENT = Sentence("the chat template does not write the tool call 'add'; give a template that does by --tokenizer_chat_template, or "
                  "remove the record")
rows("settled", lambda text, messages: Written(text).settled(messages, None), [
    ((plain, ONE), ONE), ((calling, [user("q"), NULL]), [user("q"), EMPTY]), ((of_null, [user("q"), NULL]), [user("q"), NULL]),
    ((of_text, [user("q"), NULL]), [user("q"), EMPTY]), ((of_text, [user("add"), NULL]), [user("add"), EMPTY]),
    ((calling, [user("None"), NULL]), [user("None"), EMPTY]), ((of_text, [user("q"), EMPTY]), [user("q"), EMPTY]),
    ((first_alone, [user("q"), NULL]), [user("q"), NULL]), ((first_alone, [user("q"), NULL, NULL]), SILENT),
    ((listed, [user("q"), NULL]), SILENT), ((listed, [user("add"), NULL]), SILENT), ((wrong, [user("q"), NULL]), SILENT)])
rows("settled_function", lambda text, messages: Written(text).settled(messages, None), [
    ((lambda given: "add" * ("function_call" in given["messages"][0]), [assistant(None, function_call={"name": "add"})]),
     [assistant(None, function_call={"name": "add"})])])

# where the assistant speaks
NOBODY = Sentence("none of the 1 messages is the assistant's, so there is nothing to learn; add one, remove the record or take --train_on "
                  "all")
WHOLE = "<user>q<e>\n<assistant>a<e>\n<user>r<e>\n<assistant>b<e>\n"
rows("turns", lambda text, marked, messages, last: Written(text, marked).turns(messages, None, last), [
    ((plain, False, TWO, False), (WHOLE, [(22, 26), (49, 53)])), ((plain, False, TWO, True), (WHOLE, [(49, 53)])),
    ((marking, True, TWO, False), (WHOLE, [(22, 26), (49, 53)])), ((marking, True, TWO, True), (WHOLE, [(49, 53)])),
    ((plain, False, ONE, True), (WHOLE[:27], [(22, 26)])), ((marking, True, ONE, True), (WHOLE[:27], [(22, 26)])),
    ((plain, False, [*ONE, user("r")], False), (WHOLE[:38], [(22, 26)])),
    ((plain, False, [user("q")], False), NOBODY), ((marking, True, [user("q")], False), NOBODY)])


def with_tools(given):
    return f"{given['tools']} " + plain(given)


def with_tools_marked(given):
    return f"{given['tools']} " + marking(given)


rows("turns_tools", lambda text, marked, last: Written(text, marked).turns(TWO, "F", last), [
    ((with_tools, False, False), ("F " + WHOLE, [(24, 28), (51, 55)])), ((with_tools, False, True), ("F " + WHOLE, [(51, 55)])),
    ((with_tools_marked, True, False), ("F " + WHOLE, [(24, 28), (51, 55)])), ((with_tools_marked, True, True), ("F " + WHOLE, [(51, 55)]))])


def half_marked(given):
    """Marks around nothing, also behind the prompt, and around each answer that is no x."""
    return f"{MARK_BEGIN}{MARK_END}" * given["add_generation_prompt"] + "".join(f"{MARK_BEGIN}{MARK_END}" + (f"{MARK_BEGIN}{m['content']}{MARK_END}" if m["content"] != "x" else "x")
                   for m in given["messages"])


MARKS_NOTHING = Sentence("the chat template's {% generation %} marks nothing in this conversation; put it around what the assistant says")
rows("turns_by_marks", lambda messages, last: Written(half_marked, True).turns(messages, None, last), [
    (([user("q"), assistant("a")], False), ("qa", [(0, 1), (1, 2)])), (([user("q"), assistant("a")], True), ("qa", [(1, 2)])),
    (([user("x"), assistant("x")], False), MARKS_NOTHING), (([user("q"), assistant("x")], True), MARKS_NOTHING)])


def rewriting(given):
    """The last message alone is written as it is."""
    last = given["messages"][-1:]
    return "".join(turn_text(dict(m, content="old")) for m in given["messages"][:-1]) + "".join(map(turn_text, last)) + \
        "<assistant>" * given["add_generation_prompt"]


def trimming(given):
    return plain({**given, "messages": [dict(m, content=m["content"][:2]) for m in given["messages"]]})


def without_prompt(given):
    return plain({**given, "add_generation_prompt": False})


def only_prompt(given):
    return "<user>" + "<assistant>" * given["add_generation_prompt"]


def otherwise(k):
    return Sentence(f"the chat template writes the conversation up to message {k} differently alone than as part of the whole, so what the "
                    "assistant says there cannot be found; put {% generation %} and {% endgeneration %} around it in a template for "
                    "--tokenizer_chat_template, or take --train_on last or all")


def left_out(k, said, became):
    return Sentence(f"the chat template leaves out or changes what the assistant says in message {k} ({said!r} became {became!r}); change "
                    "the message, or mark what is learnt by {% generation %} in a template for --tokenizer_chat_template")


rows("turns_by_prefixes", lambda text, messages: Written(text).turns(messages, None, False), [
    ((rewriting, TWO), otherwise(2)), ((rewriting, [user("old"), assistant("a")]), ("<user>old<e>\n<assistant>a<e>\n", [(24, 28)])),
    ((trimming, [user("q"), assistant("abc")]), left_out(2, "abc", "ab<e>")),
    ((trimming, [user("q"), assistant("ab"), user("r"), assistant("a" * 50)]), left_out(4, "a" * 40, "aa<e>")),
    ((without_prompt, ONE), ("<user>q<e>\n<assistant>a<e>\n", [(11, 26)])), ((only_prompt, ONE), otherwise(2)),
    ((plain, [user("q"), assistant(" a ")]), ("<user>q<e>\n<assistant> a <e>\n", [(22, 28)])),
    ((plain, [user("q"), assistant(None)]), ("<user>q<e>\n<assistant>None<e>\n", [(22, 29)]))])


def unending(given):
    return "".join(f"{m['role']}: {m['content']}\n" for m in given["messages"]) + "assistant: " * given["add_generation_prompt"]


def marking_unending(given):
    return "".join(f"{m['role']}: {MARK_BEGIN}{m['content']}{MARK_END}\n" for m in given["messages"])


rows("stops_turns", lambda text, marked: Written(text, marked).stops_turns(), [
    ((plain, False), True), ((marking, True), True), ((unending, False), False), ((marking_unending, True), False),
    ((wrong, False), True)])
end()
