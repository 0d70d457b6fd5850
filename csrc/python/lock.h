/* The lock around every operation of a store, and the rollback that is due from before: see lock.c. */
#ifndef PM_LOCK_H
#define PM_LOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

typedef struct Lock {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;   /* the thread that holds the lock; 0: none */
    Py_ssize_t depth;      /* how often that thread has taken it */
    unsigned long during;  /* the number of the garbage collection that it was taken in; 0: none */
    struct Lock *below;    /* a lock that is taken after this one, never before; or NULL */
    bool dropping;         /* nobody refers to the store any more, and it is being closed: nothing is refused */
    enum { NOTHING_DUE, ROLLBACK_DUE, ROLLBACK_OWED, WARNING_DUE } due;
    PyObject *undo; /* has the methods roll_back and warn */
} Lock;

bool lock_prepare(PyObject *module); /* adds the type */
PyObject *lock_type(void);

Lock *lock_lowest(Lock *lock); /* the last of those below, or the lock itself */
/* False, with an error: the thread runs a finalizer of the garbage collector in the middle of what it holds it for. */
bool lock_require_uninterrupted(const Lock *lock);
bool lock_is_mine(const Lock *lock); /* the calling thread is inside an operation */

/* Makes the next thread that takes the lock, from outside of any operation, roll back and warn. This calls no Python
 * code. */
void lock_abandon(Lock *lock);
void lock_owe_rollback(Lock *lock); /* the same without the warning */

/* Does that now, unless the calling thread is inside an operation. False: an error is set. */
bool lock_do_due(Lock *lock);

/* the result is dropped; false: an error is set */
bool lock_call_method(PyObject *object, PyObject *method, PyObject *argument);

/* Calls a method until it returns. An error that a signal handler raises meanwhile, or a lack of memory, is raised when
 * the method has returned; or at once, if there are too many. OutOfSpaceError is not raised then. True if no error is
 * set. */
bool lock_call_until_done(PyObject *object, PyObject *method, bool *done);

bool lock_is_collecting(void); /* the calling thread is inside the garbage collector */

#endif
