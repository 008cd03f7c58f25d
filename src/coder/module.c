/* The extension module tensorkeep.codecs._coder: what Python sees of the compiled coder. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* One binary serves all processors of an architecture: the instructions are chosen when the module is imported. */
static const char *instructions(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
        return "avx2";
    }
#endif
    return "plain";
}

static int fill(PyObject *module) {
    return PyModule_AddStringConstant(module, "simd", instructions());
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tensorkeep.codecs._coder",
    .m_doc = "The compiled coder.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__coder(void) {
    return PyModuleDef_Init(&definition);
}
