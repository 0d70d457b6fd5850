/* A recursive lock. A store has two: one around every operation, and one that is held by the thread that may commit.
 *
 *             lock_abandon                  rolled back                   warned
 *   NOTHING ──────────────▶ ROLLBACK_DUE ─────────────▶ WARNING_DUE ─────────────▶ NOTHING
 *                           by the next thread that takes the lock from outside of any operation
 *
 * A transaction that is abandoned, as in a generator that is never resumed, is left when the generator dies. The
 * garbage collector decides when that is, and in which thread: in the middle of an operation, of a computation, of
 * another thread's operation. A rollback there would take back half of what the program is doing. So the collector only
 * sets this mark. The next operation finds the mark before it begins, rolls back, and warns. Its own changes then start
 * from the last commit.
 *
 * The mark is also set when a transaction was left and its rollback lacked space (ROLLBACK_OWED). The program has
 * already got the error, so no warning follows.
 *
 * The warning is given without the lock: it may run code of the program's, which may wait for a thread that wants the
 * lock.
 *
 * Code of the program may run in the middle of an operation. If the garbage collector calls it, as a finalizer, it
 * can't take the lock again, nor a lock above it: it would see, commit or take back half of a change. Other code, such
 * as a signal handler in the middle of reading, may take a lock above this one if it need not wait: the thread that it
 * waited for may wait for this one. Either gets an error.
 *
 * The method that calls back (`call`) takes and releases the lock in C, so an interrupt cannot be raised between the
 * call and the release. The GIL guards the fields. */
#include "python/lock.h"

#include <stddef.h>
#include <structmember.h>

enum { INTERRUPTS = 8 }; /* so many in a row are meant to stop the method */

static const char IN_COLLECTOR[] =
    "the garbage collector runs a finalizer in the middle of an operation of the store, where it can't use the store: "
    "do that elsewhere, such as at the end of a with statement";
static const char TOO_LATE[] =
    "a signal handler or a finalizer in the middle of an operation of the store, or the function of a derived array, "
    "can't wait there for another thread, which uses the store: let it set a flag, and let the program do that";

static struct {
    PyObject *roll_back, *warn;
} name;
static PyObject *type;
static PyObject *out_of_space, *transaction_error; /* pmstore.OutOfSpaceError, pmstore.TransactionError */
static unsigned long collector; /* the thread that collects garbage; 0: none */
static unsigned long collections; /* how many have begun */

bool lock_call_method(PyObject *object, PyObject *method, PyObject *argument)
{
    PyObject *result = PyObject_CallMethodObjArgs(object, method, argument, NULL);
    Py_XDECREF(result);
    return result;
}

bool lock_call_until_done(PyObject *object, PyObject *method, bool *done)
{
    PyObject *kind = NULL, *value = NULL, *traceback = NULL;
    for (int i = 0; !(*done = lock_call_method(object, method, NULL)); i++) {
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        kind = value = traceback = NULL;
        if (i == INTERRUPTS) return false;
        PyErr_Fetch(&kind, &value, &traceback);
    }
    if (!kind) return true;
    /* there is space now; any other error came from a signal handler */
    if (PyErr_GivenExceptionMatches(kind, out_of_space)) {
        Py_DECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return true;
    }
    PyErr_Restore(kind, value, traceback);
    return false;
}

/* ---- taking and giving --------------------------------------------------------------------------------------- */

/* The number of the calling thread. The system reuses the id of a thread that has ended. The new thread must not own
 * locks that the old thread left behind. */
static unsigned long this_thread(void)
{
    static _Thread_local unsigned long number;
    static unsigned long last;
    if (!number) number = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return number;
}

bool lock_is_mine(const Lock *lock)
{
    return lock->owner == this_thread();
}

/* Whether the calling thread held the lock already when its garbage collection began. */
static bool is_interrupted(const Lock *lock)
{
    return lock_is_mine(lock) && lock_is_collecting() && lock->during != collections && !lock->dropping;
}

Lock *lock_lowest(Lock *lock)
{
    while (lock->below) lock = lock->below;
    return lock;
}

static bool holds_lower(const Lock *lock)
{
    for (lock = lock->below; lock; lock = lock->below)
        if (lock_is_mine(lock)) return true;
    return false;
}

static int refuse(const char *text)
{
    PyErr_SetString(transaction_error, text);
    return -1;
}

bool lock_require_uninterrupted(const Lock *lock)
{
    return !is_interrupted(lock) || refuse(IN_COLLECTOR) == 0;
}

/* 1: the calling thread holds the lock. 0: it would have to wait. -1: an error is set, perhaps by a signal handler. */
static int take(Lock *lock, bool wait)
{
    if (is_interrupted(lock) || is_interrupted(lock_lowest(lock))) return refuse(IN_COLLECTOR);
    if (lock_is_mine(lock)) {
        lock->depth++;
        return 1;
    }
    PyLockStatus status = PyThread_acquire_lock_timed(lock->lock, 0, 0);
    if (status != PY_LOCK_ACQUIRED && !wait) return 0;
    if (status != PY_LOCK_ACQUIRED && holds_lower(lock)) return refuse(TOO_LATE);
    while (status != PY_LOCK_ACQUIRED) {
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->lock, -1, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_INTR && Py_MakePendingCalls() < 0) return -1;
    }
    lock->owner = this_thread();
    lock->depth = 1;
    lock->during = lock_is_collecting() ? collections : 0;
    return 1;
}

static void give(Lock *lock)
{
    if (--lock->depth) return;
    lock->owner = 0;
    PyThread_release_lock(lock->lock);
}

/* Does what is due, and gives the lock back, which the calling thread has taken once. */
static bool do_due(Lock *lock)
{
    bool quiet = true;
    if (lock->due == ROLLBACK_DUE || lock->due == ROLLBACK_OWED) {
        bool done;
        quiet = lock_call_until_done(lock->undo, name.roll_back, &done);
        /* Not before: a thread that sees no rollback due may begin a transaction. */
        if (done) lock->due = lock->due == ROLLBACK_DUE ? WARNING_DUE : NOTHING_DUE;
    }
    bool warn = quiet && lock->due == WARNING_DUE;
    if (warn) lock->due = NOTHING_DUE;
    give(lock);
    return warn ? lock_call_method(lock->undo, name.warn, NULL) : quiet;
}

static int acquire(Lock *lock, bool wait)
{
    for (;;) {
        int taken = take(lock, wait);
        if (taken <= 0 || lock->due == NOTHING_DUE || lock->depth > 1) return taken;
        if (!do_due(lock)) return -1;
    }
}

void lock_abandon(Lock *lock)
{
    if (lock->undo) lock->due = ROLLBACK_DUE;
}

void lock_owe_rollback(Lock *lock)
{
    if (lock->undo && lock->due != ROLLBACK_DUE) lock->due = ROLLBACK_OWED;
}

bool lock_do_due(Lock *lock)
{
    if (lock->due == NOTHING_DUE) return true;
    if (acquire(lock, true) < 0) return false;
    give(lock);
    return true;
}

/* ---- the type ------------------------------------------------------------------------------------------------ */

static PyObject *lock_new(PyTypeObject *of, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"below", NULL};
    PyObject *below = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|O!:Lock", names, type, &below)) return NULL;
    PyThread_type_lock inner = PyThread_allocate_lock();
    if (!inner) return PyErr_NoMemory();
    Lock *lock = PyObject_New(Lock, of);
    if (!lock) {
        PyThread_free_lock(inner);
        return NULL;
    }
    lock->lock = inner;
    lock->owner = 0;
    lock->depth = 0;
    lock->during = 0;
    lock->dropping = false;
    lock->below = (Lock *)Py_XNewRef(below);
    lock->due = NOTHING_DUE;
    lock->undo = NULL;
    return (PyObject *)lock;
}

static void lock_dealloc(PyObject *object)
{
    Lock *lock = (Lock *)object;
    PyTypeObject *of = Py_TYPE(object);
    if (lock->depth) PyThread_release_lock(lock->lock); /* in a fork, that of a thread which is not there */
    PyThread_free_lock(lock->lock);
    Py_XDECREF(lock->undo);
    Py_XDECREF(lock->below);
    PyObject_Free(object);
    Py_DECREF(of);
}

static PyObject *lock_acquire(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    int wait = count ? PyObject_IsTrue(arguments[0]) : 1;
    int taken = wait < 0 ? -1 : acquire((Lock *)object, wait);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *lock_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    return acquire((Lock *)object, true) < 0 ? NULL : Py_NewRef(object);
}

static PyObject *lock_release(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (!lock_is_mine((Lock *)object)) {
        PyErr_SetString(PyExc_RuntimeError, "the lock is not this thread's");
        return NULL;
    }
    give((Lock *)object);
    return Py_NewRef(Py_None);
}

static PyObject *lock_exit(PyObject *object, PyObject *const *error, Py_ssize_t count)
{
    (void)error, (void)count;
    return lock_release(object, NULL);
}

/* A generator that is suspended inside a transaction may be closed by another thread. */
static PyObject *lock_release_of_any(PyObject *object, PyObject *unused)
{
    (void)unused;
    Lock *lock = (Lock *)object;
    if (lock->depth && !lock_is_mine(lock)) lock->depth = 1;
    if (lock->depth) give(lock);
    return Py_NewRef(Py_None);
}

static PyObject *lock_call(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count < 1 || count > 3) return PyErr_Format(PyExc_TypeError, "call() takes a function and up to two arguments");
    Lock *lock = (Lock *)object;
    if (acquire(lock, true) < 0) return NULL;
    PyObject *result = count == 1 ? PyObject_CallNoArgs(arguments[0])
                                  : PyObject_CallFunctionObjArgs(arguments[0], arguments[1],
                                                                 count == 3 ? arguments[2] : NULL, NULL);
    if (lock_is_mine(lock)) give(lock);
    return result;
}

static PyObject *lock_owned(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(lock_is_mine((Lock *)object));
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire, METH_FASTCALL, "acquire(wait=True): whether it was taken."},
    {"release", lock_release, METH_NOARGS, NULL},
    {"release_of_any_thread", lock_release_of_any, METH_NOARGS,
     "Releases it once; if another thread has it, as often as that thread took it."},
    {"owned", lock_owned, METH_NOARGS, "Whether the calling thread has it."},
    {"call", (PyCFunction)(void (*)(void))lock_call, METH_FASTCALL,
     "call(function, first, second): its result. The lock is held meanwhile, and released whatever is raised."},
    {"__enter__", lock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "Lock(below=): recursive. Before it is taken from outside, `undo`, if any, undoes what was abandoned. "
                "A thread that holds one below can't wait for this one."},
    {Py_tp_new, lock_new},
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_members, (PyMemberDef[]){{"undo", T_OBJECT, offsetof(Lock, undo), 0, NULL},
                                    {"dropping", T_BOOL, offsetof(Lock, dropping), 0, NULL},
                                    {NULL, 0, 0, 0, NULL}}},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};
static PyType_Spec lock_spec = {
    .name = "pmstore._locks.Lock",
    .basicsize = sizeof(Lock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lock_slots,
};

PyObject *lock_type(void)
{
    return type;
}

/* ---- the garbage collector ----------------------------------------------------------------------------------- */

bool lock_is_collecting(void)
{
    return collector == this_thread();
}

static PyObject *note_collector(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    bool begins = count && PyUnicode_Check(arguments[0]) && !PyUnicode_CompareWithASCIIString(arguments[0], "start");
    collector = begins ? this_thread() : 0;
    collections += begins;
    return Py_NewRef(Py_None);
}

static bool watch_collector(void)
{
    static PyMethodDef method = {"pmstore_collecting", (PyCFunction)(void (*)(void))note_collector, METH_FASTCALL,
                                 "Notes which thread collects garbage: no transaction is rolled back there."};
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *callbacks = gc ? PyObject_GetAttrString(gc, "callbacks") : NULL;
    PyObject *function = callbacks ? PyCFunction_New(&method, NULL) : NULL;
    bool done = function && PyList_Append(callbacks, function) == 0;
    Py_XDECREF(function);
    Py_XDECREF(callbacks);
    Py_XDECREF(gc);
    return done;
}

bool lock_prepare(PyObject *module)
{
    name.roll_back = PyUnicode_InternFromString("roll_back");
    name.warn = PyUnicode_InternFromString("warn");
    type = PyType_FromSpec(&lock_spec);
    PyObject *errors = PyImport_ImportModule("pmstore._errors");
    out_of_space = errors ? PyObject_GetAttrString(errors, "OutOfSpaceError") : NULL;
    transaction_error = errors ? PyObject_GetAttrString(errors, "TransactionError") : NULL;
    Py_XDECREF(errors);
    if (!name.roll_back || !name.warn || !type || !out_of_space || !transaction_error || !watch_collector())
        return false;
    return PyModule_AddObject(module, "Lock", Py_NewRef(type)) == 0;
}
