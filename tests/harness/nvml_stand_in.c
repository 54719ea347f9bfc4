/* A stand-in for libnvidia-ml.so.1: what the binding asks of it, about a machine that nobody here has.
 *
 * GPU 0: an H100, not in MIG mode.
 * GPU 1: an A100 in MIG mode, with slices at places 0, 2 and 3 of seven; the last tells no memory.
 * GPU 2: a T4, which knows no MIG mode; one of its processes does not show what it has.
 * GPU 3: a GB10, which has no memory of its own.
 * GPU 4: an A30 in MIG mode without a slice.
 * An eighth of each one's memory is used.
 *
 * STAND_IN_USED: a file, with which the machine is another one: two T4s, of whose memory so much is used as the file
 * says when it is asked. A line has a UUID, MiB, and up to two processes with theirs, each as PID:MIB.
 * STAND_IN_INIT: what nvmlInitWithFlags returns, in place of success.
 * STAND_IN_LOST: the number of a GPU that has fallen off its bus; STAND_IN_LOST_AS: what is returned of it instead.
 * STAND_IN_TOTAL_0: the number of a GPU that tells 0 bytes of memory.
 * STAND_IN_XIDS: faults to tell of, each as GPU:NUMBER; a GPU falls off its bus with its Xid 79.
 * STAND_IN_EVENTS: what nvmlEventSetCreate returns, in place of success.
 * STAND_IN_REGISTER: what nvmlDeviceRegisterEvents returns of GPU 0, in place of success.
 * Compiled with -DWITHOUT_MIG it is the library of a driver from before MIG, with -DWITHOUT_EVENTS of one that knows
 * neither events nor processes.
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
};

enum { MIG_UNKNOWN, MIG_OFF, MIG_ON };

#define GPUS 5
#define T4S 2
#define PLACES 7
#define PROCESSES 2
#define MIB 1048576ULL
#define NOT_TOLD 0xffffffffffffffffULL /* NVML_VALUE_NOT_AVAILABLE */
#define XID_EVENTS 8ULL
#define LOST_XID 79
#define LINE 256

struct process {
    unsigned int pid; /* 0: none */
    unsigned long long bytes;
    unsigned int gpu_instance;
    unsigned int compute_instance;
};

struct device {
    const char *uuid;
    const char *name;
    const char *bus;
    unsigned long long bytes; /* 0: not supported */
    unsigned long long used;
    int mig_mode;
    struct device *places[PLACES];
    struct process processes[PROCESSES];
    int is_heard; /* its faults are told of */
    int is_lost;
};

struct pci {
    char legacy_bus[16];
    unsigned int domain;
    unsigned int bus_number;
    unsigned int device_number;
    unsigned int device_id;
    unsigned int subsystem_id;
    char bus[32];
};

struct event {
    struct device *device;
    unsigned long long type;
    unsigned long long data;
    unsigned int gpu_instance;
    unsigned int compute_instance;
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
    .processes = {{.pid = 77, .bytes = 2048 * MIB}},
};
static struct device third_slice = {
    .uuid = "MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000002",
    .name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb+me",
    .bytes = 9728 * MIB,
};
static struct device fourth_slice = {
    .uuid = "MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000003",
    .name = "NVIDIA A100-SXM4-80GB MIG 1c.2g.20gb",
};
static struct device gpus[GPUS] = {
    {
        .uuid = "GPU-00000000-aaaa-4aaa-8aaa-000000000000",
        .name = "NVIDIA H100 80GB HBM3",
        .bus = "00000000:19:00.0",
        .bytes = 81559 * MIB,
        .mig_mode = MIG_OFF,
        .processes = {{.pid = 4242, .bytes = 9000 * MIB}, {.pid = 4243, .bytes = 1000 * MIB}},
    },
    {
        .uuid = "GPU-11111111-aaaa-4aaa-8aaa-000000000001",
        .name = "NVIDIA A100-SXM4-80GB",
        .bus = "00000000:3B:00.0",
        .bytes = 81920 * MIB,
        .mig_mode = MIG_ON,
        .places = {&first_slice, NULL, &third_slice, &fourth_slice},
    },
    {
        .uuid = "GPU-22222222-aaaa-4aaa-8aaa-000000000002",
        .name = "Tesla T4",
        .bus = "00000000:5E:00.0",
        .bytes = 15109 * MIB + MIB / 4 * 3,
        .mig_mode = MIG_UNKNOWN,
        .processes = {{.pid = 5000, .bytes = 500 * MIB}, {.pid = 5001, .bytes = NOT_TOLD}},
    },
    {
        .uuid = "GPU-33333333-aaaa-4aaa-8aaa-000000000003",
        .name = "NVIDIA GB10",
        .bus = "0000000F:01:00.0",
        .mig_mode = MIG_UNKNOWN,
    },
    {
        .uuid = "GPU-44444444-aaaa-4aaa-8aaa-000000000004",
        .name = "NVIDIA A30",
        .bus = "00000010:01:00.0",
        .bytes = 24576 * MIB,
        .mig_mode = MIG_ON,
    },
};
static struct device t4s[T4S] = {
    {.uuid = "GPU-0", .name = "Tesla T4", .bus = "00000000:00:00.0", .bytes = 10000 * MIB},
    {.uuid = "GPU-1", .name = "Tesla T4", .bus = "00000000:01:00.0", .bytes = 10000 * MIB},
};
static int users = 0;
static const char *xids = NULL; /* that are not told of yet */
unsigned int looks = 0; /* at any device's memory; read by tests */

static int give(const char *text, char *buffer, unsigned int size)
{
    int length = snprintf(buffer, size, "%s", text);
    return (unsigned int)length < size ? SUCCESS : INSUFFICIENT_SIZE;
}

/* A device as it is now. Of the caller's own: several threads ask at once. */
static struct device now(const struct device *device)
{
    struct device told = *device;
    const char *path = getenv("STAND_IN_USED");
    FILE *file = path != NULL ? fopen(path, "r") : NULL;
    char line[LINE], uuid[LINE];
    told.used = told.bytes / 8;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        unsigned long long mib;
        unsigned int pid;
        int at, length;
        if (sscanf(line, "%255s %llu%n", uuid, &mib, &at) != 2 || strcmp(uuid, device->uuid) != 0)
            continue;
        told.used = mib * MIB;
        for (int i = 0; i < PROCESSES && sscanf(line + at, " %u:%llu%n", &pid, &mib, &length) == 2; i++, at += length)
            told.processes[i] = (struct process){.pid = pid, .bytes = mib * MIB};
    }
    if (file != NULL)
        fclose(file);
    return told;
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
    *count = getenv("STAND_IN_USED") != NULL ? T4S : GPUS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device)
{
    const char *lost = getenv("STAND_IN_LOST");
    unsigned int count;
    if (nvmlDeviceGetCount_v2(&count) != SUCCESS)
        return UNINITIALIZED;
    if (index >= count)
        return INVALID_ARGUMENT;
    *device = count == T4S ? &t4s[index] : &gpus[index];
    if ((*device)->is_lost || (lost != NULL && (unsigned int)atoi(lost) == index))
        return getenv("STAND_IN_LOST_AS") != NULL ? atoi(getenv("STAND_IN_LOST_AS")) : GPU_IS_LOST;
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int size)
{
    return device->is_lost ? GPU_IS_LOST : give(device->uuid, uuid, size);
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned int size)
{
    return give(device->name, name, size);
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    if (device->bytes == 0)
        return NOT_SUPPORTED;
    looks++;
    if (getenv("STAND_IN_TOTAL_0") != NULL && device == &gpus[atoi(getenv("STAND_IN_TOTAL_0"))]) {
        *memory = (struct memory){0};
        return SUCCESS;
    }
    memory->total = device->bytes;
    memory->used = now(device).used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    return give(device->bus, pci->bus, sizeof pci->bus);
}

#ifndef WITHOUT_EVENTS

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned int *count, struct process *processes)
{
    unsigned int room = *count, found = 0;
    struct device told = now(device);
    if (device->bytes == 0)
        return NOT_SUPPORTED;
    for (; found < PROCESSES && told.processes[found].pid != 0; found++)
        if (found < room)
            processes[found] = told.processes[found];
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlEventSetCreate(void **set)
{
    const char *result = getenv("STAND_IN_EVENTS");
    if (result != NULL)
        return atoi(result);
    *set = &xids;
    xids = getenv("STAND_IN_XIDS");
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, void *set)
{
    const char *result = getenv("STAND_IN_REGISTER");
    if (result != NULL && device == &gpus[0])
        return atoi(result);
    device->is_heard = types == XID_EVENTS && set == &xids;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned int milliseconds)
{
    unsigned int gpu, number;
    int length;
    if (set != &xids || milliseconds != 0)
        return INVALID_ARGUMENT;
    while (xids != NULL && sscanf(xids, " %u:%u%n", &gpu, &number, &length) == 2) {
        xids += length;
        gpus[gpu].is_lost |= number == LOST_XID;
        if (gpus[gpu].is_heard) {
            *event = (struct event){.device = &gpus[gpu], .type = XID_EVENTS, .data = number};
            return SUCCESS;
        }
    }
    return TIMEOUT;
}

#endif

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
