/* SPDX-License-Identifier: MIT OR Unlicense */
/* read_data.h - reads records from files: .jsonl, .jsonl.gz, one JSON list of objects, .txt.
 * All text must be UTF-8. */
#ifndef DEMO_READ_DATA_H
#define DEMO_READ_DATA_H
#include <errno.h>
#include <zlib.h>
#include "dataset.h"
#include "trainer/base/files.h"

/* Returns the bytes of the first character of text; 0: it is not UTF-8. */
static inline size_t demo_utf8_bytes(const unsigned char *text, size_t left) {
    unsigned char first = *text;
    size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    /* these bounds exclude overlong forms, surrogates and code points above U+10FFFF */
    unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4 || left < bytes || text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < bytes; i++)
        if ((text[i] & 0xC0) != 0x80) return 0;
    return bytes;
}

/* Refuses text that is not UTF-8, with the same message as prepare.py. */
static inline int demo_utf8_only(const demo_reader *reader, const char *bytes, size_t size) {
    for (size_t at = 0, next; at < size; at += next) {
        next = demo_utf8_bytes((const unsigned char *)bytes + at, size - at);
        if (!next)
            return demo_wrong(reader, "byte %zu is not UTF-8; convert the file to UTF-8", at);
    }
    return 0;
}

/* Splits plain text into documents of max_len tokens, for --pretrain_mode. */
static inline int demo_dataset_take_stream(const demo_reader *reader, const char *bytes,
                                           size_t size) {
    const demo_data_options *options = reader->options;
    if (!options->pretrain_mode)
        return demo_wrong(reader, "plain text needs --pretrain_mode; or give a .jsonl file");
    if (options->pretrain_eos)
        return demo_wrong(
            reader, "is read as one text, but LLaMA-Factory's stage pt ends every line in "
                    "EOS; give a .jsonl with one text in each record, or --pretrain_eos "
                    "false --pretrain_blocks false");
    if (options->max_len < 2)
        return demo_wrong(reader, "plain text is cut into documents of --max_len tokens; set "
                                  "--max_len to 2 or more");
    if (demo_text_allowed(reader) || demo_utf8_only(reader, bytes, size)) return -1;
    size_t piece = (size_t)options->max_len;
    for (size_t at = 0; at < size && !demo_reader_full(reader); at += piece) {
        demo_record record = {0};
        demo_push_text(&record.document, bytes + at, size - at < piece ? size - at : piece,
                       true);
        demo_dataset_take((demo_dataset *)reader->set, &record, options);
    }
    return 0;
}

/* Does the JSON hold a zero character? It would end the text early, since texts of cJSON are
   zero-terminated. */
static inline bool demo_has_zero(const char *line, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!line[i]) return true;
        if (line[i] == '\\' && i + 5 < length && !strncmp(line + i + 1, "u0000", 5))
            return true;
        if (line[i] == '\\') i++;
    }
    return false;
}

static inline int demo_take_record(const demo_reader *reader, const cJSON *json) {
    const char *twice;
    if (!cJSON_IsObject(json))
        return demo_wrong(reader, "the line is %s, but an object {...} is needed",
                          demo_json_type(json));
    if ((twice = demo_json_twice(json)))
        return demo_wrong(reader, "key \"%s\" occurs twice; remove one of them", twice);
    return reader->take(reader, json);
}

/* Parses UTF-8 text that is exactly one JSON value. NULL: the error is set and says what is
   wanted. */
static inline cJSON *demo_json_parse(const demo_reader *reader, const char *text, size_t size,
                                     const char *wanted) {
    const char *end = text;
    if (demo_utf8_only(reader, text, size)) return NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    while (json && end < text + size && isspace((unsigned char)*end)) end++;
    if (json && end == text + size && !demo_has_zero(text, size)) return json;
    if (json && end == text + size)
        demo_wrong(reader,
                   "the line has a zero character (\\u0000), which is not allowed in text; "
                   "remove it");
    else
        demo_wrong(reader, "broken JSON at column %lld; %s is needed",
                   (long long)(end - text) + 1, wanted);
    cJSON_Delete(json);
    return NULL;
}

static inline int demo_read_line(const demo_reader *reader, const char *line, size_t length) {
    cJSON *json = demo_json_parse(reader, line, length, "one whole object {...} per line");
    int failed = json ? demo_take_record(reader, json) : -1;
    cJSON_Delete(json);
    return failed;
}

/* Reads one JSON list of records. In messages, the line number is the record's number. */
static inline int demo_read_list(demo_reader *reader, const char *bytes, size_t size) {
    cJSON *list = demo_json_parse(reader, bytes, size, "a list of objects, or one per line");
    int failed = list ? 0 : -1;
    for (const cJSON *item = list ? list->child : NULL;
         item && !failed && !demo_reader_full(reader); item = item->next) {
        reader->line++;
        failed = demo_take_record(reader, item);
    }
    reader->line = 0;
    cJSON_Delete(list);
    return failed;
}

/* Is the file a list of objects, or an empty list? Any other file is read as .jsonl, which
   refuses lines that are not objects. */
static inline bool demo_is_list(const char *bytes) {
    bytes += strspn(bytes, " \t\r\n");
    if (*bytes++ != '[') return false;
    bytes += strspn(bytes, " \t\r\n");
    return *bytes == '{' || *bytes == ']';
}

/* Reads one record per line and skips empty lines, until max_samples records are read. */
static inline int demo_read_jsonl(demo_reader *reader, const char *bytes, size_t size) {
    const char *end = bytes + size;
    int64_t before = *reader->read;
    for (const char *line = bytes; line < end && !demo_reader_full(reader);) {
        const char *stop = (const char *)memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((stop ? stop : end) - line);
        reader->line++;
        if (strspn(line, " \t\r") < length && demo_read_line(reader, line, length)) return -1;
        line += length + 1;
    }
    reader->line = 0;
    if (*reader->read == before && !demo_reader_full(reader))
        return demo_wrong(reader, "only empty lines; one JSON object per line is needed");
    return 0;
}

static inline bool demo_ends_with(const char *text, const char *ending) {
    size_t a = strlen(text), b = strlen(ending);
    return a >= b && !strcmp(text + a - b, ending);
}

/* Decompresses a gzip file of one or more members into zero-terminated bytes; NULL with the
   reason in *why. */
static inline char *demo_unzipped(const char *bytes, size_t size, size_t *whole,
                                  const char **why) {
    z_stream z = {.next_in = (unsigned char *)bytes};
    size_t room = 1 << 16;
    char *text = (char *)demo_alloc((int64_t)room + 1, 1);
    int status = inflateInit2(&z, 16 + MAX_WBITS);
    *whole = 0;
    while (status == Z_OK) {
        if (*whole == room) text = (char *)demo_grown(text, (room *= 2) + 1);
        z.avail_in = size < UINT_MAX ? (unsigned)size : UINT_MAX;
        z.avail_out = room - *whole < UINT_MAX ? (unsigned)(room - *whole) : UINT_MAX;
        const unsigned before_in = z.avail_in, before_out = z.avail_out;
        z.next_out = (unsigned char *)text + *whole;
        status = inflate(&z, Z_NO_FLUSH);
        size -= before_in - z.avail_in;
        *whole += before_out - z.avail_out;
        if (status == Z_STREAM_END && size) status = inflateReset(&z);
    }
    inflateEnd(&z);
    text[*whole] = 0;
    if (status == Z_STREAM_END) return text;
    *why = "it is not a complete gzip file";
    free(text);
    return NULL;
}

static inline char *demo_read_data(const char *path, size_t *size, const char **why) {
    size_t packed;
    char *bytes = demo_read_whole(path, SIZE_MAX, &packed, why);
    *size = packed;
    if (!bytes || !demo_ends_with(path, ".gz")) return bytes;
    char *text = demo_unzipped(bytes, packed, size, why);
    free(bytes);
    return text;
}

static inline bool demo_is_jsonl(const char *path) {
    static const char *const ends[] = {".jsonl", ".json", ".jsonl.gz", ".json.gz"};
    bool is = false;
    for (int i = 0; i < 4; i++) is |= demo_ends_with(path, ends[i]);
    return is;
}

/* Reads reader->path into zero-terminated bytes. stream: it is a .txt. *mark: the length of the
   byte order mark. NULL: the error is set. */
static inline char *demo_dataset_bytes(demo_reader *reader, bool stream, size_t *mark,
                                       size_t *size) {
    const char *why;
    if (!stream && !demo_is_jsonl(reader->path))
        return demo_wrong(reader,
                          "the name does not end in .jsonl, .jsonl.gz or .txt, and it is not "
                          "a token file (demos/prepare.py); give one of these"),
               (char *)NULL;
    if (stream && !reader->take_stream)
        return demo_wrong(reader, "plain text holds no records to compare; give a .jsonl file"),
               (char *)NULL;
    char *file = demo_read_data(reader->path, size, &why);
    if (!file)
        return demo_wrong(reader, "cannot be read: %s; give the path of a .jsonl or .txt file",
                          why),
               (char *)NULL;
    *mark = *size >= 3 && !memcmp(file, "\xEF\xBB\xBF", 3) ? 3 : 0;
    if (*size > *mark) return file;
    free(file);
    return demo_wrong(reader, "the file is empty; give one with at least one record"),
           (char *)NULL;
}

static inline int demo_read_dataset_file(demo_reader *reader) {
    size_t size = 0, mark = 0;
    bool stream = demo_ends_with(reader->path, ".txt");
    char *file = demo_dataset_bytes(reader, stream, &mark, &size);
    if (!file) return -1;
    int failed = stream ? reader->take_stream(reader, file + mark, size - mark)
                 : demo_is_list(file + mark)
                     ? demo_read_list(reader, file + mark, size - mark)
                     : demo_read_jsonl(reader, file + mark, size - mark);
    free(file);
    return failed;
}

/* Refuses a token file in a comma-separated list of several files. */
static inline int demo_token_file_among(const char *paths, demo_error *error) {
    char one[4352];
    for (const char *at = paths; at && strchr(paths, ',');
         at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
        if (demo_is_token_file(one))
            return demo_fail(error,
                             "%s: is a token file, which cannot be combined with other data; "
                             "let demos/prepare.py make one token file of all data sets: "
                             "--dataset ONE,OTHER",
                             one);
    }
    return 0;
}
#endif
