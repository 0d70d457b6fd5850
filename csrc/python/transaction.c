/* Transactions: the lock that says which thread may commit, and the object of the with statement.
 *
 *               enter                     enter (same thread: joins)
 *     IDLE ───────────────► OPEN depth 1 ◄──────────────► OPEN depth n
 *       ▲                    │   │                           │
 *       │ leave: commit      │   │ leave: roll back          │ leave by an exception
 *       ├────────────────────┘   │ (an exception)            ▼
 *       ├────────────────────────┘                        DOOMED
 *       └──── leave the outermost: roll back, and TransactionError if no exception is passing ──┘
 *
 * These are extension types, not classes, for two reasons.
 *
 * A transaction must be left whatever a signal handler raises, and whenever it raises it. Python runs handlers when a
 * Python function is entered and when a call returns to one, so a KeyboardInterrupt may be raised in the first
 * instruction of an __exit__ written in Python, before any try. If the last statement of the block is one long call
 * into numpy, that is the most likely place of all. Here handlers run only inside the methods of the store that are
 * called, and what they raise comes back as an error.
 *
 * A transaction that dies without having been left, as when an ExitStack is interrupted, is rolled back. The same holds
 * for one that is left because the generator that is suspended inside it dies. The rollback happens at once if the
 * transaction's own thread drops it between two operations. Otherwise, above all in the garbage collector, the rollback
 * waits for the next operation: see lock.c.
 *
 * The second reason is speed: the core needs less time for an 8-byte commit than Python for a with statement.
 *
 * Transactions are left in the reverse of the order in which they were entered, unless a generator or a coroutine was
 * suspended inside one. Then it is unknown which changes belong to which transaction, so everything is rolled back, and
 * each of them raises TransactionError.
 *
 * A transaction calls its committer, which has the protocol Committer in pmstore/_locks.pyi. */

#include "python/lock.h"
#include "python/rows.h"

#include <stddef.h>
#include <structmember.h>

static const char INNER_FAILED[] =
    "everything since the last commit was rolled back: an exception had left an inner transaction";
static const char OUT_OF_ORDER[] =
    "transactions were left out of order: an await or a yield inside a transaction let another one begin; "
    "everything since the last commit is rolled back";
static const char STILL_DUE[] =
    "an abandoned transaction must be rolled back first, and the operation that is in progress must end before "
    "that";

/* The thread that holds `inner` may commit. depth, doomed, only and note are of the open transaction, which is its. */
typedef struct {
    PyObject_HEAD
    PyObject *inner;    /* a Lock */
    Py_ssize_t depth;   /* how many with statements it is in; 0: there is none */
    const char *doomed; /* why it can't be committed, or NULL */
    PyObject *only;     /* the ranges of arrays that it declares to write (_store/only.py), or None: any */
    PyObject *note;     /* what its commit is to say of itself: of the last one that began with some; or None */
    bool usable;        /* whether the store may change: it is open, for writing, in this process */
    Lock *operations;   /* the lock around each operation of the store */
    /* True if it is, and no transaction is open; an object, for Store.commit: Python reads those quickest */
    PyObject *idle;
} TransactionLock;

typedef struct {
    PyObject_HEAD
    PyObject *store, *committer;
    PyObject *only, *note; /* as in TransactionLock */
    TransactionLock *lock;
    Py_ssize_t depth; /* how many with statements there were when this one was entered, with it; 0: not inside */
    bool dying;       /* it can no longer be left */
} Transaction;

static struct {
    PyObject *acquire, *release, *owned;           /* of a Lock */
    PyObject *commit, *rollback, *writable, *both, *note; /* of a committer */
} name;
static PyTypeObject *transaction_type;

static PyObject *transaction_error(const char *text)
{
    PyObject *module = PyImport_ImportModule("pmstore._errors");
    PyObject *type = module ? PyObject_GetAttrString(module, "TransactionError") : NULL;
    if (type) PyErr_SetString(type, text);
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
}

/* Read-only, closed or forked: raises what the store says of it. */
static PyObject *refuse(Transaction *self)
{
    if (lock_call_method(self->committer, name.writable, NULL)) transaction_error("the store is being closed");
    return NULL;
}

/* Whether the calling thread has the lock; -1: an error. */
static int owns(TransactionLock *lock)
{
    PyObject *owned = PyObject_CallMethodObjArgs(lock->inner, name.owned, NULL);
    int answer = owned ? PyObject_IsTrue(owned) : -1;
    Py_XDECREF(owned);
    return answer;
}

/* Whether the calling thread is inside a transaction; -1: an error. */
static int mine(TransactionLock *lock)
{
    return lock->depth == 0 ? 0 : owns(lock);
}

static void note_idle(TransactionLock *lock)
{
    PyObject *before = lock->idle;
    lock->idle = PyBool_FromLong(lock->usable && lock->depth == 0);
    Py_DECREF(before);
}

static void declare(TransactionLock *lock, PyObject *only)
{
    if (lock->only == only) return;
    PyObject *before = lock->only;
    lock->only = Py_NewRef(only);
    Py_DECREF(before);
}

static void take_note(TransactionLock *lock, PyObject *note)
{
    if (lock->note == note) return;
    PyObject *before = lock->note;
    lock->note = Py_NewRef(note);
    Py_DECREF(before);
}

static void give_back(TransactionLock *lock)
{
    lock->depth = 0;
    lock->doomed = NULL;
    declare(lock, Py_None);
    take_note(lock, Py_None);
    note_idle(lock);
    lock_call_method(lock->inner, name.release, NULL);
}

/* The same, while an error may be set, which stays. */
static void give_back_beside(TransactionLock *lock)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    give_back(lock);
    if (type) PyErr_Restore(type, value, traceback);
}

/* ---- entering ---------------------------------------------------------------------------------------------------- */

static PyObject *join(Transaction *self)
{
    TransactionLock *lock = self->lock;
    if (!lock->usable) return refuse(self);
    if (lock->doomed == OUT_OF_ORDER) return transaction_error(OUT_OF_ORDER);
    if (self->only == Py_None) {
        declare(lock, Py_None);
    } else if (lock->only != Py_None) {
        PyObject *only = Py_NewRef(lock->only);
        PyObject *both = PyObject_CallMethodObjArgs(self->committer, name.both, only, self->only, NULL);
        Py_DECREF(only);
        if (!both) return NULL;
        declare(lock, both);
        Py_DECREF(both);
    }
    if (self->note != Py_None) take_note(lock, self->note);
    self->depth = ++lock->depth;
    return Py_NewRef(self->store);
}

/* What was abandoned before this transaction is no part of it. */
static bool begin_clean(TransactionLock *lock)
{
    if (!lock_do_due(lock->operations)) return false;
    return lock->operations->due != ROLLBACK_DUE || transaction_error(STILL_DUE);
}

static PyObject *enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    Transaction *self = (Transaction *)object;
    TransactionLock *lock = self->lock;
    if (self->depth) return transaction_error("this transaction has begun already: each with statement needs its own");
    if (!lock_require_uninterrupted(lock->operations)) return NULL;
    int inside = mine(lock);
    if (inside < 0) return NULL;
    if (inside) return join(self);
    /* In a forked process the lock may be that of a thread which is not there. What is just being closed is waited
     * for. */
    if (!lock->usable && !lock_call_method(self->committer, name.writable, NULL)) return NULL;
    if (!lock_call_method(lock->inner, name.acquire, NULL)) return NULL;
    if (!lock->usable) { /* closed while this thread waited */
        give_back(lock);
        return PyErr_Occurred() ? NULL : refuse(self);
    }
    if (lock->operations->due && !begin_clean(lock)) {
        give_back_beside(lock);
        return NULL;
    }
    declare(lock, self->only);
    take_note(lock, self->note);
    self->depth = lock->depth = 1;
    note_idle(lock);
    return Py_NewRef(self->store);
}

/* ---- leaving ----------------------------------------------------------------------------------------------------- */

/* Whether this is the moment for a rollback: the transaction's own thread is between two operations, and the garbage
 * collector did not interrupt it. */
static bool may_roll_back(TransactionLock *lock)
{
    if (lock_is_collecting() || lock_is_mine(lock->operations)) return false;
    int own = owns(lock);
    if (own < 0) PyErr_Clear();
    return own == 1;
}

/* Takes everything back to the last commit, now or before the next operation; true if no error is set. Changes that
 * are not taken back would be in the next commit. */
static bool roll_back(Transaction *self)
{
    Lock *operations = self->lock->operations;
    bool done, quiet;
    if (self->dying || !may_roll_back(self->lock)) {
        lock_abandon(operations);
        return true;
    }
    quiet = lock_call_until_done(self->committer, name.rollback, &done);
    if (!done) lock_owe_rollback(operations);
    return quiet;
}

/* The same, while an error is set, which stays. */
static void roll_back_beside(Transaction *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (!roll_back(self)) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/* The commit is to say something of itself. */
static bool put_note(Transaction *self)
{
    if (self->lock->note == Py_None) return true;
    PyObject *note = Py_NewRef(self->lock->note);
    bool put = lock_call_method(self->committer, name.note, note);
    Py_DECREF(note);
    return put;
}

/* The outermost with statement ends. */
static bool end(Transaction *self, bool failing)
{
    const char *doomed = self->lock->doomed;
    if (failing || doomed) {
        if (!roll_back(self)) return false;
        if (!failing) transaction_error(doomed);
        return failing;
    }
    bool committed = put_note(self);
    PyObject *only = Py_NewRef(self->lock->only);
    if (committed) committed = lock_call_method(self->committer, name.commit, only);
    Py_DECREF(only);
    /* After an error what is pending stays pending; an interrupt leaves nothing pending. */
    if (!committed && !PyErr_ExceptionMatches(PyExc_Exception)) roll_back_beside(self);
    return committed;
}

/* False: an error is set. Whatever happens, this transaction has been left. */
static bool leave(Transaction *self, bool failing)
{
    TransactionLock *lock = self->lock;
    Py_ssize_t depth = self->depth;
    bool done = true;
    if (depth == 0 || !lock->usable) { /* left already; closed, or forked */
        if (!failing) done = lock_call_method(self->committer, name.writable, NULL);
    } else if (depth != lock->depth) {
        lock->doomed = OUT_OF_ORDER;
        if (lock->depth == 1) done = roll_back(self);
        if (done && !failing) done = transaction_error(OUT_OF_ORDER);
    } else if (depth > 1) {
        if (failing && !lock->doomed) lock->doomed = INNER_FAILED;
    } else {
        done = end(self, failing);
    }
    if (self->depth == 0) return done; /* it was not inside, or was left meanwhile, by a signal handler */
    self->depth = 0;
    if (lock->depth > 1) {
        lock->depth--;
        return done;
    }
    give_back_beside(lock);
    return !PyErr_Occurred();
}

static PyObject *leave_with(PyObject *object, PyObject *const *error, Py_ssize_t count)
{
    if (!leave((Transaction *)object, count && error[0] != Py_None)) return NULL;
    return Py_NewRef(Py_None);
}

/* Nobody will leave it any more. */
static void die_inside(Transaction *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    bool now = may_roll_back(self->lock);
    self->dying = true;
    if (!leave(self, true) || (now && !lock_do_due(self->lock->operations))) PyErr_WriteUnraisable(self->store);
    PyErr_Restore(type, value, traceback);
}

static void transaction_dealloc(PyObject *object)
{
    Transaction *self = (Transaction *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->depth) die_inside(self);
    Py_DECREF(self->store);
    Py_DECREF(self->committer);
    Py_DECREF(self->only);
    Py_DECREF(self->note);
    Py_DECREF(self->lock);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static int transaction_traverse(PyObject *object, visitproc visit, void *arg)
{
    Transaction *self = (Transaction *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->store);
    Py_VISIT(self->committer);
    Py_VISIT(self->only);
    Py_VISIT(self->note);
    Py_VISIT(self->lock);
    return 0;
}

static PyType_Slot transaction_slots[] = {
    {Py_tp_doc, "What `Store.transaction` gives to a with statement, which gets the store, once."},
    {Py_tp_dealloc, transaction_dealloc},
    {Py_tp_traverse, transaction_traverse},
    {Py_tp_methods, (PyMethodDef[]){{"__enter__", enter, METH_NOARGS, NULL},
                                    {"__exit__", (PyCFunction)(void (*)(void))leave_with, METH_FASTCALL, NULL},
                                    {NULL, NULL, 0, NULL}}},
    {0, NULL},
};
static PyType_Spec transaction_spec = {
    .name = "pmstore._locks.Transaction",
    .basicsize = sizeof(Transaction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transaction_slots,
};

/* ---- whose lock it is -------------------------------------------------------------------------------------------- */

static PyObject *transaction_lock_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"usable", "below", NULL};
    int usable;
    PyObject *below;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "pO!", names, &usable, lock_type(), &below)) return NULL;
    PyObject *inner = PyObject_CallFunctionObjArgs(lock_type(), below, NULL);
    if (!inner) return NULL;
    TransactionLock *lock = PyObject_New(TransactionLock, type);
    if (!lock) {
        Py_DECREF(inner);
        return NULL;
    }
    lock->inner = inner;
    lock->depth = 0;
    lock->doomed = NULL;
    lock->only = Py_NewRef(Py_None);
    lock->note = Py_NewRef(Py_None);
    lock->usable = usable;
    lock->operations = (Lock *)Py_NewRef((PyObject *)lock_lowest((Lock *)below));
    lock->idle = Py_NewRef(Py_False);
    note_idle(lock);
    return (PyObject *)lock;
}

static void transaction_lock_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((TransactionLock *)object)->inner);
    Py_DECREF(((TransactionLock *)object)->operations);
    Py_DECREF(((TransactionLock *)object)->only);
    Py_DECREF(((TransactionLock *)object)->note);
    Py_DECREF(((TransactionLock *)object)->idle);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *transaction_lock_mine(PyObject *object, PyObject *unused)
{
    (void)unused;
    int inside = mine((TransactionLock *)object);
    return inside < 0 ? NULL : PyBool_FromLong(inside);
}

static PyObject *transaction_lock_transaction(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 && count != 4)
        return PyErr_Format(PyExc_TypeError,
                            "transaction() takes a store, a committer, the ranges that it declares, and a note");
    Transaction *transaction = PyObject_GC_New(Transaction, transaction_type);
    if (!transaction) return NULL;
    transaction->store = Py_NewRef(arguments[0]);
    transaction->committer = Py_NewRef(arguments[1]);
    transaction->only = Py_NewRef(arguments[2]);
    transaction->note = Py_NewRef(count == 4 ? arguments[3] : Py_None);
    transaction->lock = (TransactionLock *)Py_NewRef(object);
    transaction->depth = 0;
    transaction->dying = false;
    PyObject_GC_Track(transaction);
    return (PyObject *)transaction;
}

static PyObject *transaction_lock_usable(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((TransactionLock *)object)->usable);
}

static int transaction_lock_set_usable(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    int usable = value ? PyObject_IsTrue(value) : 0;
    if (usable < 0) return -1;
    ((TransactionLock *)object)->usable = usable;
    note_idle((TransactionLock *)object);
    return 0;
}

static PyObject *transaction_lock_doomed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((TransactionLock *)object)->doomed != NULL);
}

static PyType_Slot transaction_lock_slots[] = {
    {Py_tp_doc,
     "TransactionLock(usable, below): which thread may commit, and whether any may. below: a Lock, of which the lowest "
     "one is around each operation of the store."},
    {Py_tp_new, transaction_lock_new},
    {Py_tp_dealloc, transaction_lock_dealloc},
    {Py_tp_members, (PyMemberDef[]){{"inner", T_OBJECT_EX, offsetof(TransactionLock, inner), 0, NULL},
                                    {"idle", T_OBJECT_EX, offsetof(TransactionLock, idle), READONLY, NULL},
                                    {NULL, 0, 0, 0, NULL}}},
    {Py_tp_getset,
     (PyGetSetDef[]){{"usable", transaction_lock_usable, transaction_lock_set_usable, NULL, NULL},
                     {"doomed", transaction_lock_doomed, NULL, "Whether an open transaction can't be committed.", NULL},
                     {NULL, NULL, NULL, NULL, NULL}}},
    {Py_tp_methods,
     (PyMethodDef[]){{"mine", transaction_lock_mine, METH_NOARGS, "Whether this thread is inside a transaction."},
                     {"transaction", (PyCFunction)(void (*)(void))transaction_lock_transaction, METH_FASTCALL,
                      "transaction(store, committer, only, note=None): one that has not begun."},
                     {NULL, NULL, 0, NULL}}},
    {0, NULL},
};
static PyType_Spec transaction_lock_spec = {
    .name = "pmstore._locks.TransactionLock",
    .basicsize = sizeof(TransactionLock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = transaction_lock_slots,
};

static bool prepare(PyObject *module)
{
    const struct {
        PyObject **object;
        const char *text;
    } names[] = {
        {&name.acquire, "acquire"},
        {&name.release, "release_of_any_thread"},
        {&name.owned, "owned"},
        {&name.commit, "commit_now"},
        {&name.rollback, "roll_back_now"},
        {&name.writable, "require_writable"},
        {&name.both, "declared_in_both"},
        {&name.note, "put_note"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].object = PyUnicode_InternFromString(names[i].text))) return false;
    if (!lock_prepare(module) || !rows_prepare(module)) return false;
    PyObject *lock = PyType_FromSpec(&transaction_lock_spec);
    if (!lock || PyModule_AddObject(module, "TransactionLock", lock) < 0) return false;
    transaction_type = (PyTypeObject *)PyType_FromSpec(&transaction_spec);
    return transaction_type && PyModule_AddObject(module, "Transaction", Py_NewRef(transaction_type)) == 0;
}

PyMODINIT_FUNC PyInit__locks(void)
{
    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "pmstore._locks", .m_size = -1};
    /* Which a free-threaded Python takes as a wish for the GIL, and rightly */
    PyObject *module = PyModule_Create(&definition);
    if (!module || !prepare(module)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
