/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward_server_for_tests PORT_FILE MODE [N] - a reward server on 127.0.0.1 that answers
 * rightly, late, wrongly or not at all.
 *
 * It writes its port to PORT_FILE and serves one request at a time until it is killed, or for
 * ten minutes.
 *   rule          1 if the query's last number is the label's, else 0, as the trainer's
 *                 --reward_rule last_number
 *   busy N        503 to the first N requests of every rollout, then rule
 *   gone N        N rollouts of rule, then always 500
 *   silent N      N rollouts of rule, then no answer
 *   500, 404      always this status
 * The other modes break the answer itself: see answer() and serve(). */
#include <arpa/inet.h>
#include <ctype.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#include <cjson/cJSON.h>

static int listen_somewhere(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bool bound = listener >= 0 && !bind(listener, (struct sockaddr *)&address, length) &&
                 !listen(listener, 16);
    if (!bound || getsockname(listener, (struct sockaddr *)&address, &length)) return -1;
    *port = ntohs(address.sin_port);
    return listener;
}

/* The whole request for free(), zero-ended, and where its body begins; NULL if it broke off. */
static char *read_request(int peer, char **body) {
    size_t room = 1 << 20, got = 0, wanted = 0;
    char *bytes = malloc(room + 1);
    for (ssize_t part = 1; part > 0 && got < room;) {
        part = read(peer, bytes + got, room - got);
        if (part > 0) got += (size_t)part;
        bytes[got] = 0;
        char *end = strstr(bytes, "\r\n\r\n"), *length = strcasestr(bytes, "content-length:");
        if (!end || !length) continue;
        *body = end + 4;
        wanted = (size_t)(*body - bytes) + strtoul(length + 15, NULL, 10);
        if (got >= wanted) return bytes;
    }
    free(bytes);
    return NULL;
}

static void write_all(int peer, const char *bytes, size_t size) {
    for (ssize_t part = 1; size && part > 0; bytes += part, size -= (size_t)part) {
        part = write(peer, bytes, size);
        if (part <= 0) return;
    }
}

static void respond(int peer, int status, const char *body) {
    char head[128];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %d X\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
                        status, strlen(body));
    write_all(peer, head, (size_t)size);
    write_all(peer, body, strlen(body));
}

/* The last whole number in a text, in its digits; empty where there is none. */
static const char *last_number(const char *text, size_t *length) {
    const char *end = text + strlen(text), *begin;
    while (end > text && !isdigit((unsigned char)end[-1])) end--;
    for (begin = end; begin > text && isdigit((unsigned char)begin[-1]); begin--) {
    }
    *length = (size_t)(end - begin);
    return begin;
}

static double reward(const char *query, const char *prompt, const char *label) {
    size_t a, b;
    const char *said = last_number(query + strlen(prompt), &a), *right = last_number(label, &b);
    return a && a == b && !memcmp(said, right, a);
}

/* The answer for free(), or NULL for a question that is not as it should be. */
static char *answer(const char *mode, const char *question) {
    cJSON *json = cJSON_Parse(question), *out = cJSON_CreateObject(),
          *rewards = cJSON_AddArrayToObject(out, "rewards");
    const cJSON *query = cJSON_GetObjectItem(json, "query"),
                *prompt = cJSON_GetObjectItem(json, "prompts"),
                *label = cJSON_GetObjectItem(json, "labels");
    int count = cJSON_GetArraySize(query);
    int right = count > 0 && cJSON_GetArraySize(prompt) == count &&
                cJSON_GetArraySize(label) == count;
    for (int i = 0; right && i < count; i++) {
        const char *q = cJSON_GetStringValue(cJSON_GetArrayItem(query, i));
        const char *p = cJSON_GetStringValue(cJSON_GetArrayItem(prompt, i));
        const char *l = cJSON_GetStringValue(cJSON_GetArrayItem(label, i));
        right = q && p && l && !strncmp(q, p, strlen(p));
        if (right)
            cJSON_AddItemToArray(rewards, !strcmp(mode, "null") && i == 1 ? cJSON_CreateNull()
                                          : !strcmp(mode, "text") && i == 1
                                              ? cJSON_CreateString("good")
                                              : cJSON_CreateNumber(reward(q, p, l)));
    }
    if (!strcmp(mode, "short")) cJSON_DeleteItemFromArray(rewards, 0);
    if (!strcmp(mode, "long")) cJSON_AddItemToArray(rewards, cJSON_CreateNumber(1));
    char *text = right ? cJSON_PrintUnformatted(out) : NULL;
    cJSON_Delete(json);
    cJSON_Delete(out);
    return text;
}

static void respond_endlessly(int peer) {
    static char spaces[1 << 16];
    memset(spaces, ' ', sizeof spaces);
    write_all(peer, "HTTP/1.1 200 X\r\n\r\n", 18);
    for (int i = 0; i < 2000; i++) write_all(peer, spaces, sizeof spaces);
}

/* requests: how many came before this one. */
static void serve(int peer, const char *mode, double n, int requests) {
    static const char *const fixed[][2] = {
        {"garbage", "<html>busy</html>"},
        {"empty", ""},
        {"keyless", "{\"scores\": [1]}"},
        {"twice", "{\"rewards\": [1], \"rewards\": [2]}"},
        {"behind", "{\"rewards\": [1]} and more"},
        {"nan", "{\"rewards\": [0, NaN]}"},
        {"infinite", "{\"rewards\": [1, 1e999, 1, 1, 1, 1]}"},
        {"huge", "{\"rewards\": [1, 1e308, 1e308, 1, 1, 1]}"}};
    char *body = NULL, *request = read_request(peer, &body);
    char *text = request ? answer(mode, body) : NULL;
    bool posted = request && !strncmp(request, "POST /reward HTTP/1.1\r\n", 23) &&
                  strcasestr(request, "content-type: application/json");
    if (!strcmp(mode, "slow")) sleep(5);
    if (!strcmp(mode, "silent") && requests >= n) sleep(600);
    if (!strcmp(mode, "endless"))
        respond_endlessly(peer);
    else if (!strcmp(mode, "mail"))
        write_all(peer, "220 mail is taken here\r\n", 24);
    else if (!posted || !text)
        respond(peer, 400, "not a question I know");
    else if (!strcmp(mode, "500") || !strcmp(mode, "404") ||
             (!strcmp(mode, "gone") && requests >= n))
        respond(peer, !strcmp(mode, "404") ? 404 : 500, "out of order");
    else if (!strcmp(mode, "busy") && requests % ((int)n + 1) < n)
        respond(peer, 503, "busy");
    else {
        const char *said = text;
        for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
            if (!strcmp(mode, fixed[i][0])) said = fixed[i][1];
        respond(peer, 200, said);
    }
    cJSON_free(text);
    free(request);
}

int main(int argc, char **argv) {
    int port, listener = listen_somewhere(&port);
    FILE *file = argc > 2 && listener >= 0 ? fopen(argv[1], "w") : NULL;
    if (!file) return fprintf(stderr, "usage: %s PORT_FILE MODE [N]\n", argv[0]), 2;
    fprintf(file, "%d\n", port);
    fclose(file);
    signal(SIGPIPE, SIG_IGN);
    alarm(600); /* never outlives a test that was killed */
    for (int requests = 0;; requests++) {
        int peer = accept(listener, NULL, NULL);
        if (peer < 0) return 1;
        serve(peer, argv[2], argc > 3 ? strtod(argv[3], NULL) : 1, requests);
        close(peer);
    }
}
