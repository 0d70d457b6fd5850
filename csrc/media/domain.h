/*
 * The persistence domain: how far a store has to get before what it wrote outlives the events that the medium is for.
 *
 *   process     tmpfs    the page cache is the medium, and ends with the machine. A kill takes no store back that the
 *                        program has made, so neither flush nor streaming store is needed; order is
 *   cpu_cache   eADR     a power cut writes the caches back. Stores have to leave the store buffer: fences
 *   memory      DAX      lines have to reach the memory: flushes or non-temporal stores, and fences
 *   disk        files    pages have to reach the disk: writes and syncs
 *
 * PMSTORE_DOMAIN overrides what was found out for memory. With PMSTORE_DOMAIN=memory, tmpfs is an emulation of
 * persistent memory. A trace records the domain memory, whatever the environment says.
 */
#ifndef PM_DOMAIN_H
#define PM_DOMAIN_H

#include "base/status.h"

/* PMSTORE_DOMAIN may name those before PM_DOMAIN_DISK. domain.c and SURVIVES in pmstore/_doctor.py name all. */
typedef enum { PM_DOMAIN_PROCESS, PM_DOMAIN_CPU_CACHE, PM_DOMAIN_MEMORY, PM_DOMAIN_DISK } pm_domain;

const char *pm_domain_name(pm_domain domain);

/* domain: what was found out. PM_INVALID if PMSTORE_DOMAIN is none of process, cpu_cache, memory. */
pm_status pm_domain_override(pm_domain *domain);

#endif
