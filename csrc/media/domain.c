#include "media/domain.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"process", "cpu_cache", "memory", "disk"};

const char *pm_domain_name(pm_domain domain)
{
    return names[domain];
}

pm_status pm_domain_override(pm_domain *domain)
{
    const char *name = getenv("PMSTORE_DOMAIN");
    if (!name || !*name) return PM_OK;
    for (pm_domain i = PM_DOMAIN_PROCESS; i < PM_DOMAIN_DISK; i++)
        if (!strcmp(name, names[i])) {
            *domain = i;
            return PM_OK;
        }
    return pm_fail(PM_INVALID, "PMSTORE_DOMAIN is process, cpu_cache or memory, not %.40s", name);
}
