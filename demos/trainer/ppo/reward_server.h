/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward_server.h - rewards from HTTP servers, with OpenRLHF's protocol:
 *
 *     POST {"query": ["prompt and text", ...], "prompts": ["prompt", ...], "labels": ["right answer, or nothing", ...]}
 *     ->   {"rewards": [0.5, ...]}, one for every query
 *
 * If a server cannot be reached or is busy, the request is sent again, after a wait that
 * doubles each time. An invalid answer is an error at once, since a retry would give the same
 * answer. Functions return 0, or -1 with a message in error. Needs libcurl. */
#ifndef DEMO_REWARD_SERVER_H
#define DEMO_REWARD_SERVER_H

#include <signal.h>
#include <time.h>
#include <curl/curl.h>
#include "trainer/base/escape.h"
#include "trainer/data/data.h"

enum { DEMO_NO_ANSWER = -2 };
#define DEMO_REWARD_MOST \
    1e100 /* so that sums of squared rewards over all texts do not overflow */

typedef struct {
    const char *urls; /* comma list; the rewards of several servers are added */
    double timeout;   /* limit of one request, in seconds */
    int64_t retries;  /* tries after the first */
    /* seconds before the second try; doubled before each further try, at most a minute */
    double backoff;
    /* once this is nonzero, waiting for an answer ends; NULL: never */
    const volatile sig_atomic_t *interrupted;
} demo_reward_servers;

typedef struct {
    char **query, **prompt, **label; /* (count) UTF-8 */
    int64_t count;
} demo_reward_question;

/* ---- texts: requests must be UTF-8, but a model of bytes may generate any bytes ---- */

/* Converts bytes to UTF-8. Zero bytes and bytes that are not UTF-8 become U+FFFD. The caller
   calls free(). */
static inline char *demo_bytes_as_text(const char *bytes, size_t count) {
    char *text = (char *)demo_alloc((int64_t)(3 * count + 1), 1);
    size_t used = 0;
    for (size_t at = 0, length; at < count; at += length ? length : 1) {
        length = bytes[at] ? (size_t)demo_utf8_length(bytes + at, (int64_t)(count - at)) : 0;
        memcpy(text + used, length ? bytes + at : "\xEF\xBF\xBD", length ? length : 3);
        used += length ? length : 3;
    }
    text[used] = 0;
    return text;
}

/* Appends the bytes of these tokens, without special tokens, to the stb_ds array `bytes`. */
static inline char *demo_append_tokens(char *bytes, const demo_words *words, const int32_t *ids,
                                       int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++) {
        const char byte = (char)ids[t];
        demo_slice word = {&byte, ids[t] < 256};
        if (words->file) word = demo_token_word(words->file, ids[t]);
        if (word.size) memcpy(arraddnptr(bytes, word.size), word.bytes, word.size);
    }
    return bytes;
}

/* Converts tokens to text, without special tokens. The caller calls free(). */
static inline char *demo_tokens_as_text(const demo_words *words, const int32_t *ids,
                                        int64_t tokens) {
    char *bytes = demo_append_tokens(NULL, words, ids, tokens);
    char *text = demo_bytes_as_text(bytes, (size_t)arrlen(bytes));
    arrfree(bytes);
    return text;
}

/* ---- request and answer as JSON ---- */

static inline char *demo_question_json(const demo_reward_question *question) {
    static const char *const keys[] = {"query", "prompts", "labels"};
    char **const lists[] = {question->query, question->prompt, question->label};
    cJSON *json = cJSON_CreateObject();
    for (int k = 0; k < 3; k++) {
        cJSON *list = cJSON_AddArrayToObject(json, keys[k]);
        for (int64_t i = 0; i < question->count; i++)
            cJSON_AddItemToArray(list, cJSON_CreateString(lists[k][i]));
    }
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    return text;
}

/* The first URL of a comma list, for messages: without user and password, which are secret. */
static inline const char *demo_url_shown(char *text, size_t size, const char *url) {
    const char *authority = strstr(url, "://"), *end = url + strcspn(url, ","), *host;
    if (!authority || authority > end)
        return snprintf(text, size, "%.*s", (int)(end - url), url), text;
    host = authority += 3;
    for (const char *at = authority; at < authority + strcspn(authority, ",/?#"); at++)
        if (*at == '@') host = at + 1;
    snprintf(text, size, "%.*s%.*s", (int)(authority - url), url, (int)(end - host), host);
    return text;
}

__attribute__((format(printf, 3, 4))) static inline int demo_server_wrong(demo_error *error,
                                                                          const char *url,
                                                                          const char *format,
                                                                          ...) {
    va_list arguments;
    char shown[200];
    demo_fail(error, "reward server %s: ", demo_url_shown(shown, sizeof shown, url));
    va_start(arguments, format);
    demo_fail_more(error, format, arguments);
    va_end(arguments);
    return -1;
}

/* Adds the rewards of an answer to rewards (count). */
static inline int demo_answer_add(const cJSON *json, const char *url, double *rewards,
                                  int64_t count, demo_error *error) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "rewards");
    int64_t i = 0;
    if (!cJSON_IsArray(list))
        return demo_server_wrong(
            error, url, "the answer's \"rewards\" is %s, but a list of %lld numbers is needed",
            list ? demo_json_type(list) : "missing", (long long)count);
    if (cJSON_GetArraySize(list) != count)
        return demo_server_wrong(error, url,
                                 "%d rewards for %lld texts; the server must give one for each "
                                 "query, in their order",
                                 cJSON_GetArraySize(list), (long long)count);
    for (const cJSON *item = list->child; item; item = item->next, i++) {
        if (!cJSON_IsNumber(item))
            return demo_server_wrong(error, url, "rewards[%lld] is %s, but a number is needed",
                                     (long long)i, demo_json_type(item));
        if (!(fabs(item->valuedouble) <= DEMO_REWARD_MOST))
            return demo_server_wrong(error, url,
                                     "rewards[%lld] is %g, which cannot be trained on; the "
                                     "server must give a number of at most %g",
                                     (long long)i, item->valuedouble, DEMO_REWARD_MOST);
        rewards[i] += item->valuedouble;
    }
    return 0;
}

/* Parses an answer, which must be a single JSON object, and adds its rewards to rewards
   (count). */
static inline int demo_answer_read(const char *bytes, size_t length, const char *url,
                                   double *rewards, int64_t count, demo_error *error) {
    const char *end = bytes;
    cJSON *json = cJSON_ParseWithLengthOpts(bytes, length, &end, 0);
    const char *twice = cJSON_IsObject(json) ? demo_json_twice(json) : NULL;
    int failed;
    while (json && end < bytes + length && isspace((unsigned char)*end)) end++;
    if (!json || end < bytes + length)
        failed = demo_server_wrong(error, url,
                                   "the answer is not JSON from byte %lld of %lld on: %.60s; "
                                   "{\"rewards\": [finite numbers]} alone is needed",
                                   (long long)(end - bytes), (long long)length,
                                   length ? end : "(empty)");
    else if (twice)
        failed = demo_server_wrong(
            error, url, "the answer has the key \"%s\" twice; the server must give it once",
            twice);
    else
        failed = demo_answer_add(json, url, rewards, count, error);
    cJSON_Delete(json);
    return failed;
}

/* ---- HTTP ---- */

#ifndef DEMO_ANSWER_LIMIT
#define DEMO_ANSWER_LIMIT (1 << 26) /* bytes; enough for more than a million rewards */
#endif

typedef struct {
    char *bytes; /* zero-terminated if not empty */
    size_t size;
    long status;
    CURLcode code;
} demo_answer;

static inline size_t demo_answer_write(char *data, size_t one, size_t count, void *user) {
    demo_answer *answer = (demo_answer *)user;
    char *grown = answer->size + count > DEMO_ANSWER_LIMIT
                      ? NULL
                      : (char *)realloc(answer->bytes, answer->size + count + 1);
    (void)one;            /* always 1 */
    if (!grown) return 0; /* aborts the transfer */
    memcpy(grown + answer->size, data, count);
    answer->bytes = grown;
    answer->size += count;
    grown[answer->size] = 0;
    return count;
}

/* Excludes servers on this machine from any proxy of the environment, in addition to those that
   no_proxy already excludes. */
static inline void demo_bypass_proxy(CURL *curl) {
    const char *others = getenv("no_proxy") ? getenv("no_proxy") : getenv("NO_PROXY");
    char list[2048];
    snprintf(list, sizeof list, "localhost,127.0.0.1,::1%s%s", others ? "," : "",
             others ? others : "");
    curl_easy_setopt(curl, CURLOPT_NOPROXY, others && !strcmp(others, "*") ? "*" : list);
}

static inline bool demo_request_interrupted(const demo_reward_servers *servers) {
    return servers->interrupted && *servers->interrupted;
}

/* libcurl calls this at least once a second; a nonzero result ends the transfer. */
static inline int demo_post_goes_on(void *user, curl_off_t down_all, curl_off_t down,
                                    curl_off_t up_all, curl_off_t up) {
    (void)down_all, (void)down, (void)up_all, (void)up;
    return demo_request_interrupted((const demo_reward_servers *)user);
}

/* Sends one request and waits for its answer; the result is in *answer. */
static inline void demo_post(const demo_reward_servers *servers, const char *url,
                             const char *body, demo_answer *answer) {
    CURL *curl = curl_easy_init();
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    /* no "Expect: 100-continue" before the body */
    headers = curl_slist_append(headers, "Expect:");
    *answer = (demo_answer){.code = CURLE_FAILED_INIT};
    if (curl && headers) {
        curl_easy_setopt(curl, CURLOPT_URL, url);
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body);
        curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(body));
        curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
        curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (long)(1000 * servers->timeout + 1));
        /* limits the wait for a name or an address that does not answer */
        curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS,
                         (long)(1000 * fmin(servers->timeout, 30) + 1));
        curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, demo_post_goes_on);
        curl_easy_setopt(curl, CURLOPT_XFERINFODATA, (void *)servers);
        curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
        curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L); /* the process has other threads */
#if LIBCURL_VERSION_NUM >= 0x075700
        /* do not wait for a thread that still resolves a name */
        curl_easy_setopt(curl, CURLOPT_QUICK_EXIT, 1L);
#endif
        curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, demo_answer_write);
        curl_easy_setopt(curl, CURLOPT_WRITEDATA, answer);
        demo_bypass_proxy(curl);
        answer->code = curl_easy_perform(curl);
        curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer->status);
    }
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl);
}

/* Is the answer not HTTP? Then a retry is useless. */
static inline bool demo_answer_foreign(const demo_answer *answer) {
    return answer->code == CURLE_UNSUPPORTED_PROTOCOL ||
           answer->code == CURLE_WEIRD_SERVER_REPLY;
}

/* Is a retry useful? Yes if no answer came, or if the HTTP status says that the server is busy
   or failed. */
static inline bool demo_answer_may_improve(const demo_answer *answer) {
    /* CURLE_WRITE_ERROR: the answer is longer than DEMO_ANSWER_LIMIT */
    bool came = answer->code == CURLE_OK || demo_answer_foreign(answer) ||
                answer->code == CURLE_WRITE_ERROR;
    return !came || (answer->code == CURLE_OK &&
                     (answer->status == 408 || answer->status == 429 || answer->status >= 500));
}

/* Sleeps in short intervals: if a signal is delivered to another thread, it does not end a
   sleep here. */
static inline void demo_wait(const demo_reward_servers *servers, double seconds) {
    for (; seconds > 0 && !demo_request_interrupted(servers); seconds -= 0.1) {
        struct timespec piece = {0, (long)(1e9 * fmin(seconds, 0.1))};
        nanosleep(&piece, NULL);
    }
}

static inline double demo_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Reports the wait, so that the run does not seem to hang. */
static inline void demo_wait_say(const demo_reward_servers *servers, const char *url,
                                 const demo_answer *answer, int64_t tries, double wait) {
    char shown[200], status[32];
    snprintf(status, sizeof status, "HTTP status %ld", answer->status);
    fprintf(stderr, "reward server %s: %s; try %lld of %lld in %g s\n",
            demo_url_shown(shown, sizeof shown, url),
            answer->code == CURLE_OK ? status : curl_easy_strerror(answer->code),
            (long long)tries + 1, (long long)servers->retries + 1, wait);
}

/* Sends the request until an answer comes, no retry is left or a signal came. Returns the
   number of tries. */
static inline int64_t demo_post_patiently(const demo_reward_servers *servers, const char *url,
                                          const char *body, demo_answer *answer) {
    double wait = servers->backoff;
    int64_t tries = 1;
    for (demo_post(servers, url, body, answer);
         demo_answer_may_improve(answer) && tries <= servers->retries &&
         !demo_request_interrupted(servers);
         tries++) {
        demo_wait_say(servers, url, answer, tries, wait);
        demo_wait(servers, wait);
        if (demo_request_interrupted(servers)) break;
        wait = fmin(2 * wait, 60);
        free(answer->bytes);
        demo_post(servers, url, body, answer);
    }
    return tries;
}

/* Asks one server and adds its rewards to rewards (count). Returns as demo_ask_servers. */
static inline int demo_ask_one(const demo_reward_servers *servers, const char *url,
                               const char *body, double *rewards, int64_t count,
                               demo_error *error) {
    demo_answer answer;
    double begin = demo_clock();
    int64_t tries = demo_post_patiently(servers, url, body, &answer);
    int failed;
    if (demo_answer_may_improve(&answer) && demo_request_interrupted(servers))
        failed = 1;
    else if (answer.code == CURLE_WRITE_ERROR)
        failed = demo_server_wrong(
            error, url,
            "the answer is longer than %d bytes; {\"rewards\": [%lld numbers]} is needed",
            DEMO_ANSWER_LIMIT, (long long)count);
    else if (demo_answer_foreign(&answer))
        failed = demo_server_wrong(error, url,
                                   "the server there does not speak HTTP (%s); check the "
                                   "host and the port of remote_rm_url",
                                   curl_easy_strerror(answer.code));
    else if (answer.code != CURLE_OK) {
        demo_server_wrong(error, url,
                          "no answer in %lld tr%s over %.1f s (%s); start it, correct "
                          "remote_rm_url, or raise remote_rm_timeout %g or remote_rm_retries "
                          "%lld",
                          (long long)tries, tries == 1 ? "y" : "ies", demo_clock() - begin,
                          curl_easy_strerror(answer.code), servers->timeout,
                          (long long)servers->retries);
        failed = DEMO_NO_ANSWER;
    } else if (answer.status != 200)
        failed = demo_server_wrong(error, url,
                                   "HTTP status %ld in %lld tr%s, with: %.80s; 200 is "
                                   "needed; check the server's log",
                                   answer.status, (long long)tries, tries == 1 ? "y" : "ies",
                                   answer.size ? answer.bytes : "(nothing)");
    else
        failed = demo_answer_read(answer.size ? answer.bytes : "", answer.size, url, rewards,
                                  count, error);
    free(answer.bytes);
    return failed;
}

/* Adds the servers' rewards to rewards (question->count). Returns 0; 1, without a message, if a
   signal ended the wait; DEMO_NO_ANSWER, with a message, if a server did not answer; else -1
   with a message. */
static inline int demo_ask_servers(const demo_reward_servers *servers,
                                   const demo_reward_question *question, double *rewards,
                                   demo_error *error) {
    char *body = demo_question_json(question), *list = strdup(servers->urls), *rest = list;
    int failed = body ? 0 : -1;
    if (failed)
        demo_fail(error, "no memory for a request of %lld texts; lower rollout_batch_size",
                  (long long)question->count);
    for (char *url; !failed && (url = strsep(&rest, ","));)
        failed = demo_ask_one(servers, url, body, rewards, question->count, error);
    cJSON_free(body);
    free(list);
    return failed;
}

/* Returns what is wrong with the first URL of a comma list; NULL if it is valid. */
static inline const char *demo_url_wrong(const char *list) {
    char *port = NULL, *url = strndup(list, strcspn(list, ","));
    CURLU *parsed = curl_url();
    CURLUcode code = url && parsed ? curl_url_set(parsed, CURLUPART_URL, url, 0)
                                   : CURLUE_OUT_OF_MEMORY;
    bool zero = !code && !curl_url_get(parsed, CURLUPART_PORT, &port, 0) &&
                !strtol(port, NULL, 10);
    curl_free(port);
    curl_url_cleanup(parsed);
    free(url);
    if (code == CURLUE_BAD_PORT_NUMBER || zero)
        return "whose port is no number from 1 to 65535";
    return code == CURLUE_OUT_OF_MEMORY ? "for which there is no memory"
           : code ? "which is no URL; give http://HOST:PORT/PATH in printable characters, "
                    "others as %XX"
                  : NULL;
}

/* Checks the URLs of all servers. */
static inline int demo_servers_check(const demo_reward_servers *servers, demo_error *error) {
    for (const char *url = servers->urls; url;
         url = strchr(url, ',') ? strchr(url, ',') + 1 : NULL) {
        bool http = !strncmp(url, "http://", 7) || !strncmp(url, "https://", 8);
        char shown[400];
        const char *why = http ? demo_url_wrong(url) : NULL;
        if (why)
            return demo_fail(error, "remote_rm_url holds '%s', %s",
                             demo_url_shown(shown, sizeof shown, url), why);
        if (!http)
            return demo_fail(error,
                             "remote_rm_url holds '%s', which does not begin with http:// or "
                             "https://; Python files are not run here, serve it as in "
                             "{\"query\": [..]} -> {\"rewards\": [..]}",
                             demo_url_shown(shown, sizeof shown, url));
    }
    return 0;
}

#endif
