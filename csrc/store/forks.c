#include "store/forks.h"

#include "space/region_fork.h"

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pm_store *stores;

/* False for a closed store, and for a store of the parent: nothing of it can change. */
static bool is_open(const pm_store *store)
{
    return !store->forked && !store->closed;
}

/* A thread may be bringing the committed image up to date. That changes nothing that the child sees, once pages are
 * private. */
static void before_fork(void)
{
    pthread_mutex_lock(&list_mutex);
    for (pm_store *store = stores; store; store = store->next) {
        if (store->forked) continue;
        pm_thread_lock(&store->mutex);
        if (is_open(store)) pm_region_fork_begins(&store->region);
    }
}

static void after_fork_in_parent(void)
{
    for (pm_store *store = stores; store; store = store->next) {
        if (store->forked) continue;
        if (is_open(store)) pm_region_fork_is_over(&store->region);
        pm_thread_unlock(&store->mutex);
    }
    pthread_mutex_unlock(&list_mutex);
}

static void after_fork_in_child(void)
{
    for (pm_store *store = stores; store; store = store->next) {
        if (is_open(store)) {
            pm_region_fork_in_child(&store->region);
            pm_media_forked(&store->media);
            pm_policy_close(&store->region.policy); /* the kernel keeps watching the parent */
        }
        store->forked = true;
    }
    pthread_mutex_init(&list_mutex, NULL);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void pm_forks_add(pm_store *store)
{
    pthread_mutex_lock(&list_mutex);
    store->next = stores;
    stores = store;
    pthread_mutex_unlock(&list_mutex);
}

void pm_forks_remove(pm_store *store)
{
    pthread_mutex_lock(&list_mutex);
    pm_store **at = &stores;
    while (*at && *at != store) at = &(*at)->next;
    if (*at) *at = store->next;
    pthread_mutex_unlock(&list_mutex);
}
