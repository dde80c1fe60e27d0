#include "example.h"

#include <stdint.h>
#include <string.h>

/* Fields of protocol buffers: https://protobuf.dev/programming-guides/encoding/ */
enum { VARINT = 0, LENGTH_DELIMITED = 2, WIRE_TYPE = 7 };
/* Before a record its length and that number's checksum; behind it its own: read by who wrote the chunk's. */
enum { HEADER_BYTES = 12, FOOTER_BYTES = 4 };

typedef struct {
    const uint8_t *next, *end;
} span;

typedef struct {
    const uint8_t *bytes;
    const span *names;
    Py_ssize_t num_names;
} search;

/* 0 if there is none, or it has more than 64 bits. */
static int read_varint(span *from, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64 && from->next < from->end; shift += 7) {
        uint8_t byte = *from->next++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return 1;
    }
    return 0;
}

/* The payload of the next length-delimited field; numbers before it are skipped. */
static int read_field(span *from, span *payload) {
    uint64_t tag, length;
    for (;;) {
        if (!read_varint(from, &tag)) return 0;
        if ((tag & WIRE_TYPE) == LENGTH_DELIMITED) break;
        if ((tag & WIRE_TYPE) != VARINT || !read_varint(from, &length)) return 0;
    }
    if (!read_varint(from, &length) || length > (uint64_t)(from->end - from->next)) return 0;
    *payload = (span){from->next, from->next + length};
    from->next = payload->end;
    return 1;
}

/* The first value of a feature's list: bytes themselves, or the varint of an integer. 1 as well if the list is empty. */
static int read_first_value(span feature, const uint8_t *bytes, int64_t *place) {
    span values, value;
    if (!read_field(&feature, &values)) return 0;
    if (values.next == values.end) return 1;
    if ((*values.next & WIRE_TYPE) == VARINT) value = (span){values.next + 1, values.end};
    else if (!read_field(&values, &value)) return 0;
    place[0] = value.next - bytes;
    place[1] = value.end - bytes;
    return 1;
}

static int read_entry(const search *search, span entry, int64_t *places) {
    span name, feature;
    if (!read_field(&entry, &name)) return 0;
    for (Py_ssize_t i = 0; i < search->num_names; i++) {
        span wanted = search->names[i];
        if (wanted.end - wanted.next == name.end - name.next &&
            memcmp(wanted.next, name.next, (size_t)(name.end - name.next)) == 0)
            return read_field(&entry, &feature) && read_first_value(feature, search->bytes, places + 2 * i);
    }
    return 1;
}

static int read_example(const search *search, span example, int64_t *places) {
    span features, entry;
    for (Py_ssize_t i = 0; i < 2 * search->num_names; i++) places[i] = -1;
    while (example.next < example.end) {
        if (!read_field(&example, &features)) return 0;
        while (features.next < features.end)
            if (!read_field(&features, &entry) || !read_entry(search, entry, places)) return 0;
    }
    return 1;
}

/* The message of the next record. */
static int read_record(span *from, span *record) {
    if (from->end - from->next < HEADER_BYTES + FOOTER_BYTES) return 0;
    uint64_t length = 0;
    for (unsigned i = 0; i < 8; i++) length |= (uint64_t)from->next[i] << (8 * i);
    from->next += HEADER_BYTES;
    if (length > (uint64_t)(from->end - from->next - FOOTER_BYTES)) return 0;
    *record = (span){from->next, from->next + length};
    from->next = record->end + FOOTER_BYTES;
    return 1;
}

/* Where the bytes of each name lie, to be freed; NULL with an exception. */
static span *spans_of(PyObject *names, Py_ssize_t num_names) {
    span *spans = PyMem_Calloc((size_t)num_names + 1, sizeof *spans);
    if (!spans) PyErr_NoMemory();
    for (Py_ssize_t i = 0; spans && i < num_names; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (PyBytes_Check(name)) {
            const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(name);
            spans[i] = (span){bytes, bytes + PyBytes_Size(name)};
        } else {
            PyErr_SetString(PyExc_TypeError, "names of bytes");
            PyMem_Free(spans);
            spans = NULL;
        }
    }
    return spans;
}

static PyObject *find_values(const search *search, span chunk) {
    Py_ssize_t num_records = 0;
    span rest = chunk, record;
    for (; rest.next < rest.end; num_records++)
        if (!read_record(&rest, &record)) Py_RETURN_NONE;
    Py_ssize_t num_bytes = num_records * 2 * search->num_names * (Py_ssize_t)sizeof(int64_t);
    PyObject *result = PyByteArray_FromStringAndSize(NULL, num_bytes);
    if (!result) return NULL;
    int64_t *places = (int64_t *)(void *)PyByteArray_AsString(result);
    for (; chunk.next < chunk.end; places += 2 * search->num_names) {
        if (!read_record(&chunk, &record) || !read_example(search, record, places)) {
            Py_DECREF(result);
            Py_RETURN_NONE;
        }
    }
    return result;
}

PyObject *py_find_values(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    PyObject *names, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "y*O!:find_values", &data, &PyTuple_Type, &names)) return NULL;
    Py_ssize_t num_names = PyTuple_Size(names);
    span *spans = spans_of(names, num_names);
    if (spans) {
        const uint8_t *bytes = data.buf;
        search search = {bytes, spans, num_names};
        result = find_values(&search, (span){bytes, bytes + data.len});
        PyMem_Free(spans);
    }
    PyBuffer_Release(&data);
    return result;
}
