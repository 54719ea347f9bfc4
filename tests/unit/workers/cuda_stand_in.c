/* A stand-in for libcuda.so.1: what a program sees of the device that it is shown.
 *
 * STAND_IN_MIB: the memory of each device.
 * STAND_IN_COUNT: how many devices there are, in place of one.
 * STAND_IN_FAILS: the name of a function that fails with 999, an error that CUDA cannot name.
 * STAND_IN_HANGS: if it is there, cuInit does not return.
 * STAND_IN_ASKED: a file; each cuInit adds a line of what is shown: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, UNKNOWN = 999 };

#define MIB 1048576ULL

static int is_begun = 0;

static int count(void)
{
    const char *told = getenv("STAND_IN_COUNT");
    return told == NULL ? 1 : atoi(told);
}

static int result(const char *name)
{
    const char *failing = getenv("STAND_IN_FAILS");
    if (failing != NULL && strcmp(failing, name) == 0)
        return UNKNOWN;
    return is_begun ? SUCCESS : NOT_INITIALIZED;
}

static const char *shown(const char *name)
{
    const char *value = getenv(name);
    return value == NULL ? "" : value;
}

int cuInit(unsigned int flags)
{
    FILE *asked = fopen(shown("STAND_IN_ASKED"), "a");
    if (asked != NULL) {
        fprintf(asked, "%s %s\n", shown("CUDA_VISIBLE_DEVICES"), shown("CUDA_DEVICE_ORDER"));
        fclose(asked);
    }
    while (getenv("STAND_IN_HANGS") != NULL)
        pause();
    is_begun = 1;
    return flags == 0 ? result("cuInit") : INVALID_VALUE;
}

int cuDeviceGetCount(int *devices)
{
    *devices = count();
    return result("cuDeviceGetCount");
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal + 7; /* a handle is no number of a device */
    return ordinal < count() ? result("cuDeviceGet") : INVALID_DEVICE;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    *bytes = strtoull(shown("STAND_IN_MIB"), NULL, 10) * MIB;
    return device == 7 ? result("cuDeviceTotalMem_v2") : INVALID_DEVICE;
}
