/* SPDX-License-Identifier: MIT OR Unlicense */
/* tensorboard.h - files that TensorBoard reads, without TensorFlow or protobuf.
 *
 * Written after TensorFlow's published formats: the framing of a record
 * (tensorflow/core/lib/io/record_writer.cc, and "TFRecord" in its guide), the messages Event,
 * SessionLog (core/util/event.proto), Summary (core/framework/summary.proto), TensorProto and
 * TensorShapeProto (core/framework/tensor.proto, tensor_shape.proto), and protobuf's wire
 * format (protobuf.dev/programming-guides/encoding). A file is
 *
 *     record: uint64 length, uint32 masked CRC32C of these 8 bytes, the bytes of an Event,
 *             uint32 masked CRC32C of them; all little-endian
 *
 * and its first Event says "brain.Event:2". Readers skip an unfinished last record, which a
 * killed process may leave. */
#ifndef DEMO_TENSORBOARD_H
#define DEMO_TENSORBOARD_H

#include "trainer/base/memory.h"
#include "report.h"

/* ---- protobuf fields, appended to an stb_ds array of bytes ---- */

typedef uint8_t *demo_bytes;

/* Protobuf field numbers. */
enum { EVENT_WALL_TIME = 1, EVENT_STEP = 2, EVENT_FILE_VERSION = 3, EVENT_SUMMARY = 5 };
enum { EVENT_SESSION_LOG = 7, SESSION_LOG_STATUS = 1, SUMMARY_VALUE = 1 };
enum { VALUE_TAG = 1, VALUE_SIMPLE = 2, VALUE_TENSOR = 8, VALUE_METADATA = 9 };
enum { METADATA_PLUGIN = 1, PLUGIN_NAME = 1, METADATA_CLASS = 4 };
enum { TENSOR_DTYPE = 1, TENSOR_SHAPE = 2, TENSOR_STRING = 8, SHAPE_DIM = 2, DIM_SIZE = 1 };
/* Values of these fields. */
enum { SESSION_START = 1, CLASS_TENSOR = 2, DTYPE_STRING = 7 };
enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

static inline void demo_put_varint(demo_bytes *b, uint64_t value) {
    for (; value >= 128; value >>= 7) arrput(*b, (uint8_t)(value | 128));
    arrput(*b, (uint8_t)value);
}

static inline void demo_put_little(demo_bytes *b, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) arrput(*b, (uint8_t)(value >> 8 * i));
}

static inline void demo_put_field(demo_bytes *b, int field, int wire) {
    demo_put_varint(b, (uint64_t)field << 3 | (uint64_t)wire);
}

static inline void demo_put_number(demo_bytes *b, int field, uint64_t value) {
    demo_put_field(b, field, WIRE_VARINT);
    demo_put_varint(b, value);
}

static inline void demo_put_double(demo_bytes *b, int field, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    demo_put_field(b, field, WIRE_64);
    demo_put_little(b, bits, 8);
}

static inline void demo_put_float(demo_bytes *b, int field, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    demo_put_field(b, field, WIRE_32);
    demo_put_little(b, bits, 4);
}

static inline void demo_put_bytes(demo_bytes *b, int field, const void *data, size_t size) {
    demo_put_field(b, field, WIRE_BYTES);
    demo_put_varint(b, size);
    if (size) memcpy(arraddnptr(*b, size), data, size);
}

static inline void demo_put_text(demo_bytes *b, int field, const char *text) {
    demo_put_bytes(b, field, text, strlen(text));
}

/* Appends a message as a field, and frees it. */
static inline void demo_put_message(demo_bytes *b, int field, demo_bytes *inner) {
    demo_put_bytes(b, field, *inner, (size_t)arrlen(*inner));
    arrfree(*inner);
}

/* ---- records ---- */

/* CRC-32C (Castagnoli), masked as in a TFRecord: rotated, and a constant added. Without the
   mask, the CRC of bytes that contain their own CRC would be useless. */
static inline uint32_t demo_masked_crc(const uint8_t *data, int64_t size) {
    uint32_t crc = 0xffffffffu;
    for (int64_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1)));
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Writes an event by one write, and frees it. Returns false with errno set on failure. */
static inline bool demo_event_write(FILE *file, demo_bytes *event) {
    demo_bytes record = NULL;
    demo_put_little(&record, (uint64_t)arrlen(*event), 8);
    demo_put_little(&record, demo_masked_crc(record, 8), 4);
    memcpy(arraddnptr(record, arrlen(*event)), *event, (size_t)arrlen(*event));
    demo_put_little(&record, demo_masked_crc(*event, arrlen(*event)), 4);
    bool written = fwrite(record, 1, (size_t)arrlen(record), file) == (size_t)arrlen(record) &&
                   !fflush(file);
    arrfree(record);
    arrfree(*event);
    return written;
}

/* ---- events ---- */

static inline demo_bytes demo_event_new(double wall_time, int64_t step) {
    demo_bytes event = NULL;
    demo_put_double(&event, EVENT_WALL_TIME, wall_time);
    if (step) demo_put_number(&event, EVENT_STEP, (uint64_t)step);
    return event;
}

/* Writes the first events of a file. Readers then discard events of earlier files in the folder
   from `step` on, since a resumed run repeats those steps. */
static inline bool demo_events_begin(FILE *file, double wall_time, int64_t step) {
    demo_bytes version = demo_event_new(wall_time, 0), start = demo_event_new(wall_time, step);
    demo_bytes log = NULL;
    demo_put_text(&version, EVENT_FILE_VERSION, "brain.Event:2");
    demo_put_number(&log, SESSION_LOG_STATUS, SESSION_START);
    demo_put_message(&start, EVENT_SESSION_LOG, &log);
    bool written = demo_event_write(file, &version);
    return demo_event_write(file, &start) && written;
}

static inline void demo_put_scalar(demo_bytes *summary, const char *tag, double value) {
    demo_bytes scalar = NULL;
    demo_put_text(&scalar, VALUE_TAG, tag);
    demo_put_float(&scalar, VALUE_SIMPLE, (float)value);
    demo_put_message(summary, SUMMARY_VALUE, &scalar);
}

static inline void demo_put_dimension(demo_bytes *shape, int64_t size) {
    demo_bytes dimension = NULL;
    demo_put_number(&dimension, DIM_SIZE, (uint64_t)size);
    demo_put_message(shape, SHAPE_DIM, &dimension);
}

/* Samples as a table, a tensor of strings whose first row names the columns. TensorBoard's
   plugin "text" shows it. */
static inline demo_bytes demo_sample_tensor(const demo_sample *samples, int64_t count) {
    demo_bytes tensor = NULL, shape = NULL;
    char reward[32];
    demo_put_number(&tensor, TENSOR_DTYPE, DTYPE_STRING);
    demo_put_dimension(&shape, count + 1);
    demo_put_dimension(&shape, 3);
    demo_put_message(&tensor, TENSOR_SHAPE, &shape);
    demo_put_text(&tensor, TENSOR_STRING, "prompt");
    demo_put_text(&tensor, TENSOR_STRING, "text");
    demo_put_text(&tensor, TENSOR_STRING, "reward");
    for (int64_t i = 0; i < count; i++) {
        snprintf(reward, sizeof reward, "%g", samples[i].reward);
        demo_put_text(&tensor, TENSOR_STRING, samples[i].prompt);
        demo_put_text(&tensor, TENSOR_STRING, samples[i].text);
        demo_put_text(&tensor, TENSOR_STRING, reward);
    }
    return tensor;
}

static inline void demo_put_samples(demo_bytes *summary, const demo_report *r) {
    demo_bytes value = NULL, metadata = NULL, plugin = NULL;
    demo_bytes tensor = demo_sample_tensor(r->samples, r->sample_count);
    char tag[64];
    demo_put_text(&plugin, PLUGIN_NAME, "text");
    demo_put_message(&metadata, METADATA_PLUGIN, &plugin);
    demo_put_number(&metadata, METADATA_CLASS, CLASS_TENSOR);
    demo_put_text(&value, VALUE_TAG, demo_report_tag(tag, r, "samples"));
    demo_put_message(&value, VALUE_TENSOR, &tensor);
    demo_put_message(&value, VALUE_METADATA, &metadata);
    demo_put_message(summary, SUMMARY_VALUE, &value);
}

static inline bool demo_events_write(FILE *file, double wall_time, const demo_report *r) {
    demo_bytes event = demo_event_new(wall_time, r->step), summary = NULL;
    char tag[64];
    for (int i = 0; i < r->count; i++)
        if (r->figure[i].form != DEMO_PLACE)
            demo_put_scalar(&summary, demo_report_tag(tag, r, r->figure[i].name),
                            r->figure[i].value);
    if (r->sample_count) demo_put_samples(&summary, r);
    demo_put_message(&event, EVENT_SUMMARY, &summary);
    return demo_event_write(file, &event);
}
#endif
