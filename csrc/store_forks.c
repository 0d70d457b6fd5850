#include "store_forks.h"

#include "region_fork.h"

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pm_store *stores;

/* A store that is a parent's, or closed, has nothing that could change. */
static bool is_open(const pm_store *store)
{
    return !store->forked && !store->closed;
}

/* A thread may be bringing home up to date, which changes nothing that a child sees once its pages are its own. */
static void before_fork(void)
{
    pthread_mutex_lock(&list_mutex);
    for (pm_store *store = stores; store; store = store->next) {
        if (store->forked) continue;
        pm_lock(&store->mutex);
        if (is_open(store)) pm_fork_begins(&store->region);
    }
}

static void after_fork_in_parent(void)
{
    for (pm_store *store = stores; store; store = store->next) {
        if (store->forked) continue;
        if (is_open(store)) pm_fork_is_over(&store->region);
        pm_unlock(&store->mutex);
    }
    pthread_mutex_unlock(&list_mutex);
}

static void after_fork_in_child(void)
{
    for (pm_store *store = stores; store; store = store->next) {
        if (is_open(store)) {
            pm_fork_in_child(&store->region);
            pm_media_forked(&store->media);
            pm_watch_close(&store->region.watches); /* the kernel goes on watching the parent */
        }
        store->forked = true;
    }
    pthread_mutex_init(&list_mutex, NULL);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void pm_list_store(pm_store *store)
{
    pthread_mutex_lock(&list_mutex);
    store->next = stores;
    stores = store;
    pthread_mutex_unlock(&list_mutex);
}

void pm_unlist_store(pm_store *store)
{
    pthread_mutex_lock(&list_mutex);
    pm_store **at = &stores;
    while (*at && *at != store) at = &(*at)->next;
    if (*at) *at = store->next;
    pthread_mutex_unlock(&list_mutex);
}
