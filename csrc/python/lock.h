/* The lock around every operation of a store, and what is owed from before: see lock.c. */
#ifndef PM_PYTHON_LOCK_H
#define PM_PYTHON_LOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner; /* the thread that has it; 0: none */
    Py_ssize_t depth;    /* how often */
    enum { NOTHING_DUE, ROLLBACK_DUE, ROLLBACK_OWED, WARNING_DUE } due;
    PyObject *undo; /* has the methods roll_back and warn */
} Lock;

bool lock_prepare(PyObject *module); /* adds the type */
PyObject *lock_type(void);

bool lock_is_mine(const Lock *lock); /* the calling thread is inside an operation */

/* Whoever takes the lock next, from outside of any operation, rolls back and warns. Calls nothing. */
void lock_abandon(Lock *lock);
void lock_owe_rollback(Lock *lock); /* the same without the warning */

/* Does that now, unless the calling thread is inside an operation. False: an error is set. */
bool lock_settle(Lock *lock);

bool call_method(PyObject *object, PyObject *method, PyObject *argument); /* for what it does */

/* Calls a method until it returns. What a signal handler raises on the way, of whatever kind, or want of memory, is
 * raised when that is done, unless there is no end of it; not OutOfSpaceError. True if no error is set. */
bool call_until_done(PyObject *object, PyObject *method, bool *done);

bool is_collecting(void); /* the calling thread is inside the garbage collector */

#endif
