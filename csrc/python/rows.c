/* Writes the rows of a fit's history into the page of the newest ones (pmstore/_resume/history.py): one after each
 * iteration. Python takes twice as long for a row.
 *
 * What is not as it mostly is, such as a full page, other figures or a wrong type, is left to the caller: nothing is
 * written then. */
#include "python/rows.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { FIGURES_MOST = 8, FIGURES_AT = 32 /* in a row */ };

typedef struct {
    PyObject_HEAD
    PyObject *page;  /* keeps the bytes */
    PyObject *names; /* a tuple, of the figures */
    PyObject *clock;
    uint8_t *bytes;
    Py_ssize_t place, end, row; /* place: of the next row */
    Py_ssize_t width;           /* the number of names */
    int attempt;
} Rows;

static PyObject *rows_new(PyTypeObject *kind, PyObject *arguments, PyObject *unused)
{
    PyObject *page, *names, *clock;
    unsigned long long address;
    Py_ssize_t place, end, row;
    int attempt;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "OKnnnOiO", &page, &address, &place, &end, &row, &names, &attempt, &clock))
        return NULL;
    Py_ssize_t width = PyTuple_Check(names) ? PyTuple_Size(names) : -1;
    if (width < 0 || width > FIGURES_MOST || row != FIGURES_AT + 8 * width || place < 0 || end % row || place % row)
        return PyErr_Format(PyExc_ValueError, "there are no such rows");
    Rows *rows = (Rows *)PyType_GenericAlloc(kind, 0);
    if (!rows) return NULL;
    rows->page = Py_NewRef(page);
    rows->names = Py_NewRef(names);
    rows->clock = Py_NewRef(clock);
    rows->bytes = (uint8_t *)(uintptr_t)address;
    rows->place = place, rows->end = end, rows->row = row;
    rows->width = width;
    rows->attempt = attempt;
    return (PyObject *)rows;
}

static void rows_dealloc(PyObject *object)
{
    Rows *rows = (Rows *)object;
    PyTypeObject *kind = Py_TYPE(object);
    Py_XDECREF(rows->page);
    Py_XDECREF(rows->names);
    Py_XDECREF(rows->clock);
    ((freefunc)PyType_GetSlot(kind, Py_tp_free))(object);
    Py_DECREF(kind);
}

static bool as_double(PyObject *value, double *out)
{
    *out = PyFloat_AsDouble(value);
    return *out != -1 || !PyErr_Occurred();
}

/* The figures, by name. False, perhaps with an error: there are others, or none that are numbers. */
static bool take_figures(const Rows *rows, PyObject *figures, double *out)
{
    if (!PyDict_CheckExact(figures) || PyDict_Size(figures) != rows->width) return false;
    for (Py_ssize_t i = 0; i < rows->width; i++) {
        PyObject *value = PyDict_GetItemWithError(figures, PyTuple_GetItem(rows->names, i));
        if (!value) return false;
        Py_INCREF(value); /* its __float__ may change the dict */
        bool number = as_double(value, &out[i]);
        Py_DECREF(value);
        if (!number) return false;
    }
    return true;
}

static bool ask_clock(const Rows *rows, double *now)
{
    PyObject *time = PyObject_CallObject(rows->clock, NULL);
    bool known = time && as_double(time, now);
    Py_XDECREF(time);
    return known;
}

/* Writes a row. False: nothing is written, the clock was not asked, and no error is set; or else with an error. The
 * clock may be one that tells each time once. */
static bool write_row(Rows *rows, PyObject *const *arguments)
{
    double figures[FIGURES_MOST], now, seconds;
    if (rows->place >= rows->end) return false;
    if (!take_figures(rows, arguments[3], figures)) return false;
    long run = PyLong_AsLong(arguments[0]);
    long long iteration = PyLong_AsLongLong(arguments[1]);
    if (run != (int)run || ((run == -1 || iteration == -1) && PyErr_Occurred())) return false;
    if (!as_double(arguments[2], &seconds) || !ask_clock(rows, &now)) return false;
    if (!now) seconds = 0;
    if (rows->place >= rows->end) { /* a figure or the clock has added rows */
        PyErr_SetString(PyExc_RuntimeError, "another row was added while this one was");
        return false;
    }
    uint8_t *row = rows->bytes + rows->place;
    const int both[] = {(int)run, rows->attempt};
    memcpy(row, both, sizeof both);
    memcpy(row + 8, &iteration, sizeof iteration);
    memcpy(row + 16, &now, sizeof now);
    memcpy(row + 24, &seconds, sizeof seconds);
    memcpy(row + FIGURES_AT, figures, (size_t)rows->width * sizeof *figures);
    rows->place += rows->row;
    return true;
}

static PyObject *rows_add(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4) return PyErr_Format(PyExc_TypeError, "add() takes run, iteration, seconds and figures");
    bool written = write_row((Rows *)object, arguments);
    if (!written && PyErr_Occurred()) {
        PyObject *expected[] = {PyExc_TypeError, PyExc_ValueError, PyExc_OverflowError};
        for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
            if (PyErr_ExceptionMatches(expected[i])) {
                PyErr_Clear();
                return Py_NewRef(Py_False);
            }
        return NULL;
    }
    return PyBool_FromLong(written);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "RowPage(page, address, place, end, row, names, attempt, clock): writes rows into a page."},
    {Py_tp_new, rows_new},
    {Py_tp_dealloc, rows_dealloc},
    {Py_tp_members, (PyMemberDef[]){{"place", T_PYSSIZET, offsetof(Rows, place), READONLY, NULL},
                                    {NULL, 0, 0, 0, NULL}}},
    {Py_tp_methods, (PyMethodDef[]){{"add", (PyCFunction)(void (*)(void))rows_add, METH_FASTCALL,
                                     "add(run, iteration, seconds, figures): whether the row was written."},
                                    {NULL, NULL, 0, NULL}}},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "pmstore._locks.RowPage",
    .basicsize = sizeof(Rows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

bool rows_prepare(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    return type && PyModule_AddObject(module, "RowPage", type) == 0;
}
