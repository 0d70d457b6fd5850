/* Transactions: whose turn it is, and the object of the with statement.
 *
 *               enter                     enter (same thread: joins)
 *     IDLE ───────────────► OPEN depth 1 ◄──────────────► OPEN depth n
 *       ▲                    │   │                           │
 *       │ leave: commit      │   │ leave: roll back          │ leave by an exception
 *       ├────────────────────┘   │ (an exception)            ▼
 *       ├────────────────────────┘                        DOOMED
 *       └──── leave the outermost: roll back, and TransactionError if no exception is passing ──┘
 *
 * An extension type, not a class, for two reasons.
 *
 * Leaving has to happen whatever a signal handler raises, and when. Python runs handlers when one of its functions is
 * entered and when a call comes back to one, so that a KeyboardInterrupt may be raised in the very first instruction of
 * an __exit__ of Python's, before any try: the most likely place of all, if the last statement of the block is one long
 * call into numpy. Here handlers run only inside the methods of the store that are called, and what they raise comes
 * back as an error.
 *
 * A transaction that dies without having been left, as when an ExitStack is interrupted, is rolled back. So is one that
 * is left because the generator dies that is suspended inside it. That happens at once if its own thread lets go of it
 * between two operations. Otherwise, most of all in the garbage collector, the rollback waits for the next operation:
 * see lock.c.
 *
 * And it is on the way of every commit: of an 8-byte commit, which takes 0.3 us, a with statement of Python's is longer
 * than all the rest.
 *
 * Transactions are left in the reverse of the order in which they were entered, unless a generator or a coroutine was
 * suspended inside one. Then nobody can say which changes are whose, so everything is rolled back, and each of those
 * concerned is told. */

#include "lock.h"

#include <stddef.h>
#include <structmember.h>

static const char INNER_FAILED[] =
    "everything since the last commit was rolled back: an exception had left an inner transaction";
static const char OUT_OF_ORDER[] =
    "transactions were left out of order: an await or a yield inside a transaction let another one begin; "
    "everything since the last commit is rolled back";
static const char STILL_DUE[] =
    "an abandoned transaction is to be rolled back first, and that has to wait for the end of the operation "
    "in whose middle this one would begin";

/* Which thread may commit: the one that holds `lock`, an RLock. Of the open transaction, which is that of the lock's
 * owner: */
typedef struct {
    PyObject_HEAD
    PyObject *lock;
    Py_ssize_t depth;   /* how many with statements it is in; 0: there is none */
    const char *doomed; /* why it can't be committed, or NULL */
    PyObject *only;     /* what it promises to change of arrays (see _only.py), or None: anything */
    bool usable;        /* whether the store may change: it is open, for writing, in this process */
    Lock *operations;   /* the lock around each operation of the store */
    /* True if it is, and no transaction is open; an object, for Store.commit: Python reads those quickest */
    PyObject *idle;
} Turn;

typedef struct {
    PyObject_HEAD
    PyObject *store;
    PyObject *only; /* as of Turn */
    Turn *turn;
    Py_ssize_t depth; /* how many with statements there were when this one was entered, with it; 0: not inside */
    bool dying;       /* nobody will leave it any more */
} Transaction;

static struct {
    PyObject *acquire, *release, *give_up, *owned, *commit, *rollback, *writable, *both;
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
    if (call_method(self->store, name.writable, NULL)) transaction_error("the store is being closed");
    return NULL;
}

/* Whether the calling thread has the lock; -1: an error. */
static int owns(Turn *turn)
{
    PyObject *owned = PyObject_CallMethodObjArgs(turn->lock, name.owned, NULL);
    int answer = owned ? PyObject_IsTrue(owned) : -1;
    Py_XDECREF(owned);
    return answer;
}

/* Whether the calling thread is inside a transaction; -1: an error. */
static int mine(Turn *turn)
{
    return turn->depth == 0 ? 0 : owns(turn);
}

static void note_idle(Turn *turn)
{
    PyObject *before = turn->idle;
    turn->idle = PyBool_FromLong(turn->usable && turn->depth == 0);
    Py_DECREF(before);
}

static void promise(Turn *turn, PyObject *only)
{
    PyObject *before = turn->only;
    turn->only = Py_NewRef(only);
    Py_DECREF(before);
}

static bool take_turn(Turn *turn)
{
    if (call_method(turn->lock, name.acquire, NULL)) return true;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* A lock of Python's, unlike that of C's, can be interrupted when it has been taken. */
    if (owns(turn) == 1) call_method(turn->lock, name.release, NULL);
    PyErr_Restore(type, value, traceback); /* instead of any that was set since */
    return false;
}

static void give_turn_back(Turn *turn)
{
    turn->depth = 0;
    turn->doomed = NULL;
    promise(turn, Py_None);
    note_idle(turn);
    if (call_method(turn->lock, name.release, NULL)) return;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return;
    PyErr_Clear(); /* another thread has it: it closed a generator that was suspended inside a transaction */
    call_method(turn->lock, name.give_up, NULL);
}

/* The same, while an error may be set, which stays. */
static void give_turn_back_beside(Turn *turn)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    give_turn_back(turn);
    if (type) PyErr_Restore(type, value, traceback);
}

/* ---- entering
 * ----------------------------------------------------------------------------------------------------- */

static PyObject *join(Transaction *self)
{
    Turn *turn = self->turn;
    if (!turn->usable) return refuse(self);
    if (turn->doomed == OUT_OF_ORDER) return transaction_error(OUT_OF_ORDER);
    if (self->only == Py_None) {
        promise(turn, Py_None);
    } else if (turn->only != Py_None) {
        PyObject *only = Py_NewRef(turn->only);
        PyObject *both = PyObject_CallMethodObjArgs(self->store, name.both, only, self->only, NULL);
        Py_DECREF(only);
        if (!both) return NULL;
        promise(turn, both);
        Py_DECREF(both);
    }
    self->depth = ++turn->depth;
    return Py_NewRef(self->store);
}

/* What was abandoned before this transaction is no part of it. */
static bool begin_clean(Turn *turn)
{
    if (!lock_settle(turn->operations)) return false;
    return turn->operations->due != ROLLBACK_DUE || transaction_error(STILL_DUE);
}

static PyObject *enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    Transaction *self = (Transaction *)object;
    Turn *turn = self->turn;
    if (self->depth) return transaction_error("this transaction has begun already: each with statement needs its own");
    int inside = mine(turn);
    if (inside < 0) return NULL;
    if (inside) return join(self);
    /* In a forked process the lock may be that of a thread which is not there. What is just being closed is waited
     * for. */
    if (!turn->usable && !call_method(self->store, name.writable, NULL)) return NULL;
    if (!take_turn(turn)) return NULL;
    if (!turn->usable) { /* closed while this thread waited */
        give_turn_back(turn);
        return PyErr_Occurred() ? NULL : refuse(self);
    }
    if (turn->operations->due && !begin_clean(turn)) {
        give_turn_back_beside(turn);
        return NULL;
    }
    promise(turn, self->only);
    self->depth = turn->depth = 1;
    note_idle(turn);
    return Py_NewRef(self->store);
}

/* ---- leaving
 * ------------------------------------------------------------------------------------------------------ */

/* Whether this is the moment for a rollback: the transaction's own thread is between two operations, and the garbage
 * collector did not interrupt it. */
static bool may_roll_back(Turn *turn)
{
    if (is_collecting() || lock_is_mine(turn->operations)) return false;
    int own = owns(turn);
    if (own < 0) PyErr_Clear();
    return own == 1;
}

/* Takes everything back to the last commit, now or before the next operation; true if no error is set. What is not
 * taken back would be in the next commit. */
static bool roll_back(Transaction *self)
{
    Lock *operations = self->turn->operations;
    bool done, quiet;
    if (self->dying || !may_roll_back(self->turn)) {
        lock_abandon(operations);
        return true;
    }
    quiet = call_until_done(self->store, name.rollback, &done);
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

/* The outermost with statement ends. */
static bool end(Transaction *self, bool failing)
{
    const char *doomed = self->turn->doomed;
    if (failing || doomed) {
        if (!roll_back(self)) return false;
        if (!failing) transaction_error(doomed);
        return failing;
    }
    PyObject *only = Py_NewRef(self->turn->only);
    bool committed = call_method(self->store, name.commit, only);
    Py_DECREF(only);
    /* After an error what is pending stays pending; an interrupt leaves nothing pending. */
    if (!committed && !PyErr_ExceptionMatches(PyExc_Exception)) roll_back_beside(self);
    return committed;
}

/* False: an error is set. Whatever happens, this transaction has been left. */
static bool leave(Transaction *self, bool failing)
{
    Turn *turn = self->turn;
    Py_ssize_t depth = self->depth;
    bool done = true;
    if (depth == 0 || !turn->usable) { /* left already; closed, or forked */
        if (!failing) done = call_method(self->store, name.writable, NULL);
    } else if (depth != turn->depth) {
        turn->doomed = OUT_OF_ORDER;
        if (turn->depth == 1) done = roll_back(self);
        if (done && !failing) done = transaction_error(OUT_OF_ORDER);
    } else if (depth > 1) {
        if (failing && !turn->doomed) turn->doomed = INNER_FAILED;
    } else {
        done = end(self, failing);
    }
    if (self->depth == 0) return done; /* it was not inside, or was left meanwhile, by a signal handler */
    self->depth = 0;
    if (turn->depth > 1) {
        turn->depth--;
        return done;
    }
    give_turn_back_beside(turn);
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
    bool now = may_roll_back(self->turn);
    self->dying = true;
    if (!leave(self, true) || (now && !lock_settle(self->turn->operations))) PyErr_WriteUnraisable(self->store);
    PyErr_Restore(type, value, traceback);
}

static void transaction_dealloc(PyObject *object)
{
    Transaction *self = (Transaction *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->depth) die_inside(self);
    Py_DECREF(self->store);
    Py_DECREF(self->only);
    Py_DECREF(self->turn);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static int transaction_traverse(PyObject *object, visitproc visit, void *arg)
{
    Transaction *self = (Transaction *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->store);
    Py_VISIT(self->only);
    Py_VISIT(self->turn);
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
    .name = "pmstore._turn.Transaction",
    .basicsize = sizeof(Transaction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transaction_slots,
};

/* ---- whose turn it is
 * --------------------------------------------------------------------------------------------- */

static PyObject *turn_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"usable", "operations", NULL};
    int usable;
    PyObject *operations;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "pO!:Turn", names, &usable, lock_type(), &operations))
        return NULL;
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *lock = threading ? PyObject_CallMethod(threading, "RLock", NULL) : NULL;
    Py_XDECREF(threading);
    if (!lock) return NULL;
    Turn *turn = PyObject_New(Turn, type);
    if (!turn) {
        Py_DECREF(lock);
        return NULL;
    }
    turn->lock = lock;
    turn->depth = 0;
    turn->doomed = NULL;
    turn->only = Py_NewRef(Py_None);
    turn->usable = usable;
    turn->operations = (Lock *)Py_NewRef(operations);
    turn->idle = Py_NewRef(Py_False);
    note_idle(turn);
    return (PyObject *)turn;
}

static void turn_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((Turn *)object)->lock);
    Py_DECREF(((Turn *)object)->operations);
    Py_DECREF(((Turn *)object)->only);
    Py_DECREF(((Turn *)object)->idle);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *turn_mine(PyObject *object, PyObject *unused)
{
    (void)unused;
    int inside = mine((Turn *)object);
    return inside < 0 ? NULL : PyBool_FromLong(inside);
}

static PyObject *turn_transaction(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2) return PyErr_Format(PyExc_TypeError, "transaction() takes a store and what it promises");
    Transaction *transaction = PyObject_GC_New(Transaction, transaction_type);
    if (!transaction) return NULL;
    transaction->store = Py_NewRef(arguments[0]);
    transaction->only = Py_NewRef(arguments[1]);
    transaction->turn = (Turn *)Py_NewRef(object);
    transaction->depth = 0;
    transaction->dying = false;
    PyObject_GC_Track(transaction);
    return (PyObject *)transaction;
}

static PyObject *turn_usable(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((Turn *)object)->usable);
}

static int turn_set_usable(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    int usable = value ? PyObject_IsTrue(value) : 0;
    if (usable < 0) return -1;
    ((Turn *)object)->usable = usable;
    note_idle((Turn *)object);
    return 0;
}

static PyObject *turn_doomed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((Turn *)object)->doomed != NULL);
}

static PyType_Slot turn_slots[] = {
    {Py_tp_doc,
     "Turn(usable, operations): which thread may commit, and whether any may. operations: the store's Lock."},
    {Py_tp_new, turn_new},
    {Py_tp_dealloc, turn_dealloc},
    {Py_tp_members, (PyMemberDef[]){{"lock", T_OBJECT_EX, offsetof(Turn, lock), 0, NULL},
                                    {"idle", T_OBJECT_EX, offsetof(Turn, idle), READONLY, NULL},
                                    {NULL, 0, 0, 0, NULL}}},
    {Py_tp_getset,
     (PyGetSetDef[]){{"usable", turn_usable, turn_set_usable, NULL, NULL},
                     {"doomed", turn_doomed, NULL, "Whether a transaction is open, and can't be committed.", NULL},
                     {NULL, NULL, NULL, NULL, NULL}}},
    {Py_tp_methods,
     (PyMethodDef[]){{"mine", turn_mine, METH_NOARGS, "Whether the calling thread is inside a transaction."},
                     {"transaction", (PyCFunction)(void (*)(void))turn_transaction, METH_FASTCALL,
                      "transaction(store, only): one that has not begun."},
                     {NULL, NULL, 0, NULL}}},
    {0, NULL},
};
static PyType_Spec turn_spec = {
    .name = "pmstore._turn.Turn",
    .basicsize = sizeof(Turn),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = turn_slots,
};

static bool prepare(PyObject *module)
{
    const struct {
        PyObject **object;
        const char *text;
    } names[] = {
        {&name.acquire, "acquire"},    {&name.release, "release"},     {&name.give_up, "_release_save"},
        {&name.owned, "_is_owned"},    {&name.commit, "_commit_now"},  {&name.rollback, "_rollback_now"},
        {&name.writable, "_writable"}, {&name.both, "_both_promises"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].object = PyUnicode_InternFromString(names[i].text))) return false;
    if (!lock_prepare(module)) return false;
    PyObject *turn = PyType_FromSpec(&turn_spec);
    if (!turn || PyModule_AddObject(module, "Turn", turn) < 0) return false;
    transaction_type = (PyTypeObject *)PyType_FromSpec(&transaction_spec);
    return transaction_type && PyModule_AddObject(module, "Transaction", Py_NewRef(transaction_type)) == 0;
}

PyMODINIT_FUNC PyInit__turn(void)
{
    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "pmstore._turn", .m_size = -1};
    /* Which a free-threaded Python takes as a wish for the GIL, and rightly */
    PyObject *module = PyModule_Create(&definition);
    if (!module || !prepare(module)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
