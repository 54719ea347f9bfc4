/* A stand-in for libnvidia-ml.so.1: what the binding asks of it, about a machine that nobody here has.
 *
 * GPU 0: an H100, not in MIG mode.
 * GPU 1: an A100 in MIG mode, with slices at places 0 and 2 of seven.
 * GPU 2: a T4, which knows no MIG mode.
 * GPU 3: a GB10, which has no memory of its own.
 *
 * STAND_IN_INIT: what nvmlInitWithFlags returns, in place of success.
 * STAND_IN_LOST: the number of a GPU that has fallen off its bus.
 * Compiled with -DWITHOUT_MIG it is the library of a driver from before MIG.
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
};

enum { MIG_UNKNOWN, MIG_OFF, MIG_ON };

#define GPUS 4
#define PLACES 7
#define MIB 1048576ULL

struct device {
    const char *uuid;
    const char *name;
    unsigned long long bytes; /* 0: not supported */
    int mig_mode;
    struct device *places[PLACES];
};

struct memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

static struct device first_slice = {
    .uuid = "MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000000",
    .name = "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    .bytes = 40192 * MIB,
};
static struct device third_slice = {
    .uuid = "MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000002",
    .name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    .bytes = 9728 * MIB,
};
static struct device gpus[GPUS] = {
    {
        .uuid = "GPU-00000000-aaaa-4aaa-8aaa-000000000000",
        .name = "NVIDIA H100 80GB HBM3",
        .bytes = 81559 * MIB,
        .mig_mode = MIG_OFF,
    },
    {
        .uuid = "GPU-11111111-aaaa-4aaa-8aaa-000000000001",
        .name = "NVIDIA A100-SXM4-80GB",
        .bytes = 81920 * MIB,
        .mig_mode = MIG_ON,
        .places = {&first_slice, NULL, &third_slice},
    },
    {
        .uuid = "GPU-22222222-aaaa-4aaa-8aaa-000000000002",
        .name = "Tesla T4",
        .bytes = 15109 * MIB + MIB / 4 * 3,
        .mig_mode = MIG_UNKNOWN,
    },
    {
        .uuid = "GPU-33333333-aaaa-4aaa-8aaa-000000000003",
        .name = "NVIDIA GB10",
        .mig_mode = MIG_UNKNOWN,
    },
};
static int users = 0;

static int give(const char *text, char *buffer, unsigned int size)
{
    int length = snprintf(buffer, size, "%s", text);
    return (unsigned int)length < size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlInitWithFlags(unsigned int flags)
{
    const char *result = getenv("STAND_IN_INIT");
    (void)flags;
    if (result != NULL)
        return atoi(result);
    users++;
    return SUCCESS;
}

int nvmlShutdown(void)
{
    if (users == 0)
        return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    (void)result;
    return "an error of the stand-in";
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (users == 0)
        return UNINITIALIZED;
    *count = GPUS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device)
{
    const char *lost = getenv("STAND_IN_LOST");
    if (users == 0)
        return UNINITIALIZED;
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    if (lost != NULL && (unsigned int)atoi(lost) == index)
        return GPU_IS_LOST;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int size)
{
    return give(device->uuid, uuid, size);
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned int size)
{
    return give(device->name, name, size);
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    if (device->bytes == 0)
        return NOT_SUPPORTED;
    memory->total = device->bytes;
    memory->used = device->bytes / 8;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

#ifndef WITHOUT_MIG

int nvmlDeviceGetMigMode(struct device *device, unsigned int *current, unsigned int *pending)
{
    if (device->mig_mode == MIG_UNKNOWN)
        return NOT_SUPPORTED;
    *current = device->mig_mode == MIG_ON;
    *pending = !*current; /* another mode after the next reset is none yet */
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned int *count)
{
    *count = device->mig_mode == MIG_ON ? PLACES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned int index, struct device **slice)
{
    if (index >= PLACES)
        return INVALID_ARGUMENT;
    if (device->places[index] == NULL)
        return NOT_FOUND;
    *slice = device->places[index];
    return SUCCESS;
}

#endif
