/* SPDX-License-Identifier: MIT OR Unlicense */
/* yaml.h - reads a yaml file into a tree in which every value has its line number. The parser
 * is libyaml, which also reads JSON. Anchors, aliases, tags, duplicate keys and several
 * documents are refused, because with them a value is not written where it applies. */
#ifndef PROGRAM_YAML_H
#define PROGRAM_YAML_H

#include <yaml.h>
#include "program.h"

typedef enum { PROGRAM_VALUE, PROGRAM_LIST, PROGRAM_MAP } program_shape;

typedef struct program_node {
    program_shape shape;
    int line;
    bool plain;                 /* a value without quotes */
    char *text;                 /* text of a value */
    struct program_node *items; /* stb_ds array; for a map: key, value, key, value, .. */
} program_node;

typedef struct {
    program *p;
    const char *path;
    const char *bytes;
    size_t size, seen; /* seen: bytes of the events before the current one */
    bool json;
    yaml_parser_t parser;
    yaml_event_t event;
} program_yaml_reader;

enum { PROGRAM_YAML_DEEPEST = 32, PROGRAM_YAML_MOST = 1 << 24 };

static bool program_is_yaml(const char *word) {
    const char *dot = strrchr(word, '.');
    return dot && (!strcmp(dot, ".yaml") || !strcmp(dot, ".yml"));
}

/* ---- errors ---- */

__attribute__((format(printf, 4, 5))) static int program_at(program *p, const char *path,
                                                            int line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    demo_fail(p->error, "%.300s:%d: ", path, line);
    demo_fail_more(p->error, format, arguments);
    va_end(arguments);
    return -1;
}

/* The line of an error. For bytes that are not valid text libyaml gives an offset and no
   line. */
static int program_yaml_line(const program_yaml_reader *r) {
    int line = 1;
    if (r->parser.error != YAML_READER_ERROR) return (int)r->parser.problem_mark.line + 1;
    for (size_t i = 0; i < r->parser.problem_offset && i < r->size; i++)
        line += r->bytes[i] == '\n';
    return line;
}

static int program_yaml_broken(program_yaml_reader *r) {
    int line = program_yaml_line(r);
    const char *begin = r->bytes;
    for (int i = 1; i < line && strchr(begin, '\n'); i++) begin = strchr(begin, '\n') + 1;
    if (begin[strspn(begin, " ")] == '\t')
        return program_at(r->p, r->path, line,
                          "the line is indented by a tab, which YAML does not allow; write "
                          "spaces");
    return program_at(r->p, r->path, line, "this is not YAML: %s%s%s; correct the line",
                      r->parser.problem ? r->parser.problem : "it cannot be read",
                      r->parser.context ? " " : "", r->parser.context ? r->parser.context : "");
}

/* The first tab from `at` to `end` that is not in a comment; NULL: there is none. */
static const char *program_yaml_tab(const char *text, const char *at, const char *end) {
    for (; at < end && *at != '\t'; at++)
        if (*at == '#' && (at == text || at[-1] == ' ' || at[-1] == '\n'))
            at += strcspn(at, "\n") - 1;
    return at < end ? at : NULL;
}

/* Refuses tabs outside of quotes and block scalars, except in JSON. libyaml accepts them as
   blanks, but pyyaml, which the other programs use, refuses them. */
static int program_yaml_tabs(program_yaml_reader *r) {
    const yaml_event_t *e = &r->event;
    bool scalar = e->type == YAML_SCALAR_EVENT;
    yaml_scalar_style_t style = scalar ? e->data.scalar.style : YAML_ANY_SCALAR_STYLE;
    const char *begin = r->bytes + r->seen, *end = r->bytes + e->start_mark.index;
    bool plain = style == YAML_PLAIN_SCALAR_STYLE;
    if (plain) end = r->bytes + e->end_mark.index;
    if (style == YAML_LITERAL_SCALAR_STYLE || style == YAML_FOLDED_SCALAR_STYLE)
        end += strcspn(end, "\n"); /* only the line with the | or > */
    const char *tab = r->json || end < begin ? NULL : program_yaml_tab(r->bytes, begin, end);
    r->seen = e->end_mark.index > r->seen ? e->end_mark.index : r->seen;
    if (!tab) return 0;
    int line = 1;
    for (const char *at = r->bytes; at < tab; at++) line += *at == '\n';
    return program_at(r->p, r->path, line,
                      "the line has a tab, which YAML allows in quotes only; write spaces");
}

/* Reads the next event into r->event. */
static int program_yaml_next(program_yaml_reader *r) {
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) return program_yaml_broken(r);
    return program_yaml_tabs(r);
}

static int program_yaml_marked(program_yaml_reader *r, const yaml_char_t *anchor,
                               const yaml_char_t *tag) {
    int line = (int)r->event.start_mark.line + 1;
    if (anchor)
        return program_at(r->p, r->path, line,
                          "&%.60s is an anchor, which is not supported; write the value "
                          "itself wherever it is used",
                          anchor);
    if (tag)
        return program_at(r->p, r->path, line,
                          "%.60s is a tag, which is not supported; leave it out", tag);
    return 0;
}

static int program_yaml_key(program_yaml_reader *r, const program_node *map,
                            const program_node *key) {
    if (key->shape != PROGRAM_VALUE)
        return program_at(r->p, r->path, key->line, "a key is a list or map; write key: value");
    for (int64_t i = 0; i < arrlen(map->items); i += 2)
        if (!strcmp(map->items[i].text, key->text))
            return program_at(r->p, r->path, key->line,
                              "%.100s occurs twice, also in line %d; leave one of them out",
                              key->text, map->items[i].line);
    return 0;
}

/* ---- the tree ---- */

static int program_yaml_node(program_yaml_reader *r, program_node *node, int depth);

/* Reads the items of a list or map up to the event `end`. */
static int program_yaml_items(program_yaml_reader *r, program_node *node, yaml_event_type_t end,
                              int depth) {
    if (depth > PROGRAM_YAML_DEEPEST)
        return program_at(r->p, r->path, node->line,
                          "lists and maps are nested more than %d deep; use fewer levels",
                          PROGRAM_YAML_DEEPEST);
    while (!program_yaml_next(r)) {
        program_node item = {PROGRAM_VALUE};
        if (r->event.type == end) return 0;
        if (program_yaml_node(r, &item, depth + 1)) return -1;
        bool key = node->shape == PROGRAM_MAP && arrlen(node->items) % 2 == 0;
        if (key && program_yaml_key(r, node, &item)) return -1;
        arrput(node->items, item);
    }
    return -1;
}

static int program_yaml_value(program_yaml_reader *r, program_node *node) {
    const char *text = (const char *)r->event.data.scalar.value;
    node->shape = PROGRAM_VALUE;
    node->plain = r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    if (strlen(text) != r->event.data.scalar.length)
        return program_at(r->p, r->path, node->line,
                          "the file contains a zero byte; remove it");
    node->text = program_text("%s", text);
    return 0;
}

/* Reads the node that begins with the current event. */
static int program_yaml_node(program_yaml_reader *r, program_node *node, int depth) {
    const yaml_event_t *e = &r->event;
    node->line = (int)e->start_mark.line + 1;
    switch (e->type) {
    case YAML_SCALAR_EVENT:
        return program_yaml_marked(r, e->data.scalar.anchor, e->data.scalar.tag)
                   ? -1
                   : program_yaml_value(r, node);
    case YAML_SEQUENCE_START_EVENT:
        node->shape = PROGRAM_LIST;
        return program_yaml_marked(r, e->data.sequence_start.anchor, e->data.sequence_start.tag)
                   ? -1
                   : program_yaml_items(r, node, YAML_SEQUENCE_END_EVENT, depth);
    case YAML_MAPPING_START_EVENT:
        node->shape = PROGRAM_MAP;
        return program_yaml_marked(r, e->data.mapping_start.anchor, e->data.mapping_start.tag)
                   ? -1
                   : program_yaml_items(r, node, YAML_MAPPING_END_EVENT, depth);
    case YAML_ALIAS_EVENT:
        return program_at(r->p, r->path, node->line,
                          "*%.60s is an alias, which is not supported; write the value itself",
                          (const char *)e->data.alias.anchor);
    default: return program_at(r->p, r->path, node->line, "a value is missing; write it");
    }
}

/* Reads a file that is one document with a map at its top. */
static int program_yaml_document(program_yaml_reader *r, program_node *root) {
    /* stream start, document start */
    if (program_yaml_next(r) || program_yaml_next(r)) return -1;
    if (r->event.type == YAML_STREAM_END_EVENT)
        return program_at(r->p, r->path, 1, "the file is empty; write key: value lines");
    if (program_yaml_next(r) || program_yaml_node(r, root, 0)) return -1;
    if (root->shape != PROGRAM_MAP)
        return program_at(r->p, r->path, root->line,
                          "the file has no key; write key: value lines");
    if (program_yaml_next(r) || program_yaml_next(r)) return -1; /* document end, stream end */
    if (r->event.type != YAML_STREAM_END_EVENT)
        return program_at(r->p, r->path, (int)r->event.start_mark.line + 1,
                          "a second YAML document begins here; give one file for each run");
    return 0;
}

/* Reads the file into a tree that is never freed. 0, or -1 with a message. */
static int program_yaml_read(program *p, const char *path, program_node *root) {
    program_yaml_reader r = {.p = p, .path = path};
    const char *why = NULL;
    *root = (program_node){PROGRAM_VALUE};
    r.json = !program_is_yaml(path);
    r.bytes = demo_read_whole(path, PROGRAM_YAML_MOST, &r.size, &why);
    if (!r.bytes)
        return demo_fail(p->error, "%.300s cannot be read: %s; give the path of the file", path,
                         why);
    if (!yaml_parser_initialize(&r.parser)) demo_out_of_memory(0);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)r.bytes, r.size);
    int wrong = program_yaml_document(&r, root);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    free((void *)r.bytes);
    return wrong;
}

/* ---- reading the tree ---- */

/* The value of a key; NULL: the key is missing. */
static const program_node *program_entry(const program_node *map, const char *key) {
    for (int64_t i = 0; map->shape == PROGRAM_MAP && i < arrlen(map->items); i += 2)
        if (!strcmp(map->items[i].text, key)) return &map->items[i + 1];
    return NULL;
}

/* Is the value null, ~ or empty? python reads these as None. */
static bool program_is_null(const program_node *node) {
    return node->shape == PROGRAM_VALUE && node->plain &&
           (!*node->text || !strcmp(node->text, "~") || !strcasecmp(node->text, "null"));
}

/* The text of a key's value; NULL if it is missing, null, a list or a map. */
static const char *program_entry_text(const program_node *map, const char *key) {
    const program_node *value = program_entry(map, key);
    return value && value->shape == PROGRAM_VALUE && !program_is_null(value) ? value->text
                                                                             : NULL;
}

/* yaml 1.1 reads 010 as 8. */
static bool program_is_octal(const program_node *node) {
    const char *text = node->text + strspn(node->text, "+-");
    return node->plain && text[0] == '0' && strlen(text) > 1 &&
           strspn(text, "01234567_") == strlen(text);
}

/* Joins a list of values to a comma list; a single value stays as it is. NULL for other
   shapes. */
static char *program_joined(const program_node *list) {
    char *text = NULL;
    if (list->shape == PROGRAM_VALUE) return program_text("%s", list->text);
    for (int64_t i = 0; list->shape == PROGRAM_LIST && i < arrlen(list->items); i++) {
        if (list->items[i].shape != PROGRAM_VALUE) return NULL;
        text = program_text("%s%s%s", text ? text : "", text ? "," : "", list->items[i].text);
    }
    return list->shape == PROGRAM_LIST && !text ? program_text("%s", "") : text;
}

#endif
