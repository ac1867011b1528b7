/* Bytes in pieces, as msgspec writes them: what `kvsm.core.ledger.snapshot` would encode at once. */

#include "body.h"

#define PIECE ((Py_ssize_t)1 << 16) /* bytes of a piece, but the last */

bool stream_write(Stream *stream, const void *data, Py_ssize_t size)
{
    const char *from = data;
    while (size > 0) {
        if (stream->piece == NULL) {
            stream->piece = PyBytes_FromStringAndSize(NULL, PIECE);
            if (stream->piece == NULL || (stream->full == NULL && (stream->full = PyList_New(0)) == NULL))
                return false;
            stream->memory = PyBytes_AsString(stream->piece);
            stream->used = 0;
        }
        const Py_ssize_t room = PIECE - stream->used, part = size < room ? size : room;
        memcpy(stream->memory + stream->used, from, (size_t)part);
        stream->used += part;
        from += part;
        size -= part;
        if (stream->used == PIECE) {
            if (PyList_Append(stream->full, stream->piece) < 0)
                return false;
            Py_CLEAR(stream->piece);
        }
    }
    return true;
}

/* `head`, and then the lowest `width` bytes of a number, the highest of them first. */
static bool write_head(Stream *stream, unsigned char head, uint64_t number, int width)
{
    unsigned char bytes[9] = {head};
    for (int place = 0; place < width; place++)
        bytes[1 + place] = (unsigned char)(number >> 8 * (width - 1 - place));
    return stream_write(stream, bytes, 1 + width);
}

/* The shortest form that holds the number. */
static bool write_number(Stream *stream, uint64_t number)
{
    if (number < 0x80)
        return write_head(stream, (unsigned char)number, 0, 0);
    if (number <= UINT8_MAX)
        return write_head(stream, 0xcc, number, 1);
    if (number <= UINT16_MAX)
        return write_head(stream, 0xcd, number, 2);
    if (number <= UINT32_MAX)
        return write_head(stream, 0xce, number, 4);
    return write_head(stream, 0xcf, number, 8);
}

static bool write_bytes(Stream *stream, PyObject *object)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &bytes, &size) < 0)
        return false;
    const bool headed = size <= UINT8_MAX    ? write_head(stream, 0xc4, (uint64_t)size, 1)
                        : size <= UINT16_MAX ? write_head(stream, 0xc5, (uint64_t)size, 2)
                                             : write_head(stream, 0xc6, (uint64_t)size, 4);
    return headed && stream_write(stream, bytes, size);
}

/* Keys and numbers. What a wrong event may have brought instead, msgspec itself encodes. */
bool stream_object(Stream *stream, PyObject *object)
{
    int64_t number;
    if (PyBytes_CheckExact(object))
        return write_bytes(stream, object);
    if (read_number(object, &number))
        return write_number(stream, (uint64_t)number);
    PyObject *encoded = PyObject_CallFunctionObjArgs(python.encode, object, NULL);
    char *bytes;
    Py_ssize_t size;
    const bool done = encoded != NULL && PyBytes_AsStringAndSize(encoded, &bytes, &size) == 0 &&
                      stream_write(stream, bytes, size);
    Py_XDECREF(encoded);
    return done;
}

/* An array of two. */
bool stream_pair(Stream *stream, PyObject *first, PyObject *second)
{
    stream->items++;
    return write_head(stream, 0x92, 0, 0) && stream_object(stream, first) && stream_object(stream, second);
}

/* (how many items, the pieces), which the stream then has no more; owned. */
PyObject *stream_taken(Stream *stream)
{
    if (stream->piece != NULL) {
        PyObject *last = PyBytes_FromStringAndSize(stream->memory, stream->used);
        const bool appended = last != NULL && PyList_Append(stream->full, last) == 0;
        Py_XDECREF(last);
        Py_CLEAR(stream->piece);
        if (!appended)
            return NULL;
    }
    PyObject *pieces = stream->full != NULL ? stream->full : PyList_New(0);
    stream->full = NULL;
    return pieces == NULL ? NULL : Py_BuildValue("(LN)", (long long)stream->items, pieces);
}

void stream_clear(Stream *stream)
{
    Py_CLEAR(stream->full);
    Py_CLEAR(stream->piece);
}
