/* The extension module tensorkeep.codecs._coder: what Python sees of the compiled coder. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "coder.h"

/* Raised whenever a function takes or returns something else; codecs/coder.py compares it. */
#define INTERFACE 1

#define CACHE_LINE 64

/* Fetch the bytes [start, stop) of some memory into the core's first cache, as far as they are in the first `size`. */
static void prefetch(const uint8_t *memory, size_t start, size_t stop, size_t size) {
    for (size_t at = start; at < stop && at < size; at += CACHE_LINE) __builtin_prefetch(memory + at);
}

/* One binary serves all processors of an architecture: the instructions are chosen when the module is imported. Threads
   read this without the GIL. */
static const struct kernels *_Atomic kernels;

static int select_kernels(PyObject *module, const struct kernels *selected) {
    kernels = selected;
    return PyModule_AddStringConstant(module, "simd", selected->name);
}

PyDoc_STRVAR(use_doc, "use($module, kind, /)\n--\n\n"
                      "Use the instructions of one of `kinds`, which this processor has.");

static PyObject *use(PyObject *module, PyObject *argument) {
    const struct kernels *found[MAX_KINDS];
    const char *name;
    if (!PyArg_Parse(argument, "s", &name)) return NULL;
    for (int i = find_kernels(found) - 1; i >= 0; i--) {
        if (strcmp(found[i]->name, name) != 0) continue;
        if (select_kernels(module, found[i]) < 0) return NULL;
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no kind of instructions %R", argument);
}

static void release(Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++) PyBuffer_Release(&buffers[i]);
}

/* Get the buffers of all planes, a tuple; return their number, or -1 with an exception. */
static int get_planes(PyObject *planes, Py_ssize_t count, int flags, Py_buffer *buffers, uint8_t **starts) {
    Py_ssize_t width = PyTuple_Size(planes);
    if (width < 0) return -1;
    if (width != 1 && width != 2 && width != 4 && width != 8) {
        PyErr_Format(PyExc_ValueError, "%zd planes", width);
        return -1;
    }
    for (int i = 0; i < width; i++) {
        PyObject *plane = PyTuple_GetItem(planes, i);
        if (PyObject_GetBuffer(plane, &buffers[i], flags) < 0) {
            release(buffers, i);
            return -1;
        }
        starts[i] = buffers[i].buf;
        if (buffers[i].len != count / width || count % width) {
            PyErr_Format(PyExc_ValueError, "plane %d has %zd bytes of %zd", i, buffers[i].len, count / width);
            release(buffers, i + 1);
            return -1;
        }
    }
    return (int)width;
}

static int check_layout(int layout, int width) {
    if (layout == LAYOUT_BYTES || (layout == LAYOUT_EXPONENT && width > 1)) return 0;
    PyErr_Format(PyExc_ValueError, "layout %d of %d planes", layout, width);
    return -1;
}

/* Return whether a buffer can hold a structure of this size whose members have at most 8 bytes. */
static int fits(const Py_buffer *buffer, size_t size) {
    return (size_t)buffer->len == size && (uintptr_t)buffer->buf % 8 == 0;
}

PyDoc_STRVAR(split_doc, "split($module, raw, planes, layout, copy=None, /)\n--\n\n"
                        "Write byte k of every element to plane k; the number of planes is the elements' width. Unless "
                        "`copy` is None, the elements are copied there first and read from there: others may change "
                        "them meanwhile. Planes and copy overlap nothing.");

static void split_pieces(const uint8_t *raw, size_t count, int width, enum layout layout, uint8_t *const *planes,
                         uint8_t *copy) {
    size_t piece = PIECE * (size_t)width, size = count * (size_t)width;
    for (size_t start = 0; start < count; start += PIECE) {
        size_t length = count - start < PIECE ? count - start : PIECE, at = start * (size_t)width;
        uint8_t *parts[MAX_WIDTH];
        for (int k = 0; k < width; k++) parts[k] = planes[k] + start;
        /* The processor by itself does not read ahead far enough, as it writes several planes meanwhile. */
        prefetch(raw, at + 2 * piece, at + 3 * piece, size);
        if (copy) memcpy(copy + at, raw + at, length * (size_t)width);
        kernels->split((copy ? copy : raw) + at, length, width, layout, parts);
    }
}

static PyObject *split(PyObject *module, PyObject *arguments) {
    Py_buffer raw, buffers[MAX_WIDTH], copy = {.obj = NULL};
    PyObject *planes, *copied = Py_None;
    uint8_t *starts[MAX_WIDTH];
    int layout, width;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*O!i|O", &raw, &PyTuple_Type, &planes, &layout, &copied)) return NULL;
    int failed = copied != Py_None && PyObject_GetBuffer(copied, &copy, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0;
    if (!failed && copy.buf && copy.len != raw.len) {
        PyErr_Format(PyExc_ValueError, "the copy has %zd bytes of %zd", copy.len, raw.len);
        failed = 1;
    }
    width = failed ? -1 : get_planes(planes, raw.len, PyBUF_SIMPLE | PyBUF_WRITABLE, buffers, starts);
    failed = width < 0 || check_layout(layout, width) < 0;
    if (!failed) {
        size_t count = (size_t)(raw.len / width);
        Py_BEGIN_ALLOW_THREADS;
        split_pieces(raw.buf, count, width, (enum layout)layout, starts, copy.buf);
        Py_END_ALLOW_THREADS;
    }
    release(buffers, width < 0 ? 0 : width);
    PyBuffer_Release(&copy); /* nothing to do for None */
    PyBuffer_Release(&raw);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(merge_doc, "merge($module, planes, raw, layout, xor=False, /)\n--\n\n"
                        "Fill elements from their planes, or exclusive-or them into it. No plane may overlap `raw`.");

static void merge_xor(const uint8_t *const *planes, size_t count, int width, enum layout layout, uint8_t *raw) {
    uint8_t merged[PIECE * MAX_WIDTH];
    for (size_t start = 0; start < count; start += PIECE) {
        size_t length = count - start < PIECE ? count - start : PIECE, bytes = length * (size_t)width;
        const uint8_t *parts[MAX_WIDTH];
        for (int k = 0; k < width; k++) parts[k] = planes[k] + start;
        kernels->merge(parts, length, width, layout, merged);
        uint8_t *restrict to = raw + start * (size_t)width;
        for (size_t i = 0; i < bytes; i++) to[i] ^= merged[i];
    }
}

static PyObject *merge(PyObject *module, PyObject *arguments) {
    Py_buffer raw, buffers[MAX_WIDTH];
    PyObject *planes;
    uint8_t *starts[MAX_WIDTH];
    int layout, xor = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!w*i|p", &PyTuple_Type, &planes, &raw, &layout, &xor)) return NULL;
    int width = get_planes(planes, raw.len, PyBUF_SIMPLE, buffers, starts);
    int failed = width < 0 || check_layout(layout, width) < 0;
    if (!failed) {
        size_t count = (size_t)(raw.len / width);
        Py_BEGIN_ALLOW_THREADS;
        (xor ? merge_xor : kernels->merge)((const uint8_t *const *)starts, count, width, (enum layout)layout, raw.buf);
        Py_END_ALLOW_THREADS;
    }
    release(buffers, width < 0 ? 0 : width);
    PyBuffer_Release(&raw);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(coded_size_doc, "coded_size($module, data, /)\n--\n\n"
                             "Return about how many bytes Huffman-coding takes, without the headers of a frame.");

static PyObject *size_of(PyObject *module, PyObject *argument) {
    Py_buffer data;
    size_t size;
    (void)module;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    size = coded_size(kernels, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    return PyLong_FromSize_t(size);
}

PyDoc_STRVAR(encode_frame_doc, "encode_frame($module, encoder, data, out, first, /)\n--\n\n"
                               "Write a Zstandard frame to the front of `out`; return its length. The code may be that "
                               "of the frame before, unless this is the first of a block.");

static PyObject *encode(PyObject *module, PyObject *arguments) {
    Py_buffer encoder, data, out;
    size_t length = 0;
    int first;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*y*w*p", &encoder, &data, &out, &first)) return NULL;
    int failed = !fits(&encoder, sizeof(struct encoder)) || (size_t)out.len < frame_bound((size_t)data.len);
    if (failed) {
        PyErr_SetString(PyExc_ValueError, "`out` is too small, or the encoder has another size or alignment");
    } else {
        Py_BEGIN_ALLOW_THREADS;
        if (first) reset_encoder(encoder.buf);
        length = encode_frame(kernels, encoder.buf, data.buf, (size_t)data.len, out.buf,
                              (const uint8_t *)out.buf + out.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&encoder);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return failed ? NULL : PyLong_FromSize_t(length);
}

PyDoc_STRVAR(decode_frame_doc, "decode_frame($module, decoder, frame, out, /)\n--\n\n"
                               "Fill `out` with the content of a frame of literals; return False for any other frame.");

static PyObject *decode(PyObject *module, PyObject *arguments) {
    Py_buffer decoder, frame, out;
    int decoded = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*y*w*", &decoder, &frame, &out)) return NULL;
    int failed = !fits(&decoder, sizeof(struct decoder));
    if (failed) {
        PyErr_SetString(PyExc_ValueError, "the decoder has another size or is not aligned to 8 bytes");
    } else {
        Py_BEGIN_ALLOW_THREADS;
        decoded = decode_frame(kernels, decoder.buf, frame.buf, (size_t)frame.len, out.buf, (size_t)out.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&decoder);
    PyBuffer_Release(&frame);
    PyBuffer_Release(&out);
    return failed ? NULL : PyBool_FromLong(decoded);
}

static PyMethodDef methods[] = {
    {"use", use, METH_O, use_doc},
    {"split", split, METH_VARARGS, split_doc},
    {"merge", merge, METH_VARARGS, merge_doc},
    {"coded_size", size_of, METH_O, coded_size_doc},
    {"encode_frame", encode, METH_VARARGS, encode_frame_doc},
    {"decode_frame", decode, METH_VARARGS, decode_frame_doc},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    const struct kernels *found[MAX_KINDS];
    int count = find_kernels(found), failed = 0;
    PyObject *kinds = PyTuple_New(count);
    for (int i = 0; kinds && i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i]->name);
        failed |= !name || PyTuple_SetItem(kinds, i, name) < 0;
    }
    failed |= !kinds || PyModule_AddObjectRef(module, "kinds", kinds) < 0 ||
              select_kernels(module, found[count - 1]) < 0 ||
              PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0 ||
              PyModule_AddIntConstant(module, "ENCODER_BYTES", (long)sizeof(struct encoder)) < 0 ||
              PyModule_AddIntConstant(module, "DECODER_BYTES", (long)sizeof(struct decoder)) < 0;
    Py_XDECREF(kinds);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tensorkeep.codecs._coder",
    .m_doc = "The compiled coder.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__coder(void) {
    return PyModuleDef_Init(&definition);
}
