/* The rows of a fit's history: see rows.c. */
#ifndef PM_ROWS_H
#define PM_ROWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

bool rows_prepare(PyObject *module); /* adds the type */

#endif
