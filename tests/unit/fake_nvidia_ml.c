/*
 * A libnvidia-ml.so.1 for tests: the functions of NVML that VirNucPro calls, over the GPUs of the file $FAKE_NVML.
 * Its lines: UUID NAME MAJOR.MINOR LOST PARENT, where PARENT is the line of the GPU that an instance is of, or -1.
 * It is read again at each call, so that a test may take a GPU away.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

typedef struct { char uuid[96], name[96]; int major, minor, lost, parent; } Gpu;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

static Gpu gpus[16];
static int count;

static int load(void)
{
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return DRIVER_NOT_LOADED;
    Gpu *g = gpus;
    while (g < gpus + 16 && fscanf(file, "%95s %95s %d.%d %d %d", g->uuid, g->name, &g->major, &g->minor, &g->lost,
                                   &g->parent) == 6)
        g++;
    count = g - gpus;
    fclose(file);
    return OK;
}

static int look(Gpu *gpu) { return load() ? DRIVER_NOT_LOADED : gpu->lost ? GPU_IS_LOST : OK; }

static int nth(int parent, unsigned number, Gpu **found)
{
    for (Gpu *g = gpus; g < gpus + count; g++)
        if (g->parent == parent && number-- == 0)
            return *found = g, look(g);
    return NOT_FOUND;
}

#define ASK(gpu) do { int error = look(gpu); if (error) return error; } while (0)

int nvmlInitWithFlags(unsigned flags) { return load(); }
int nvmlShutdown(void) { return OK; }

int nvmlDeviceGetCount_v2(unsigned *found)
{
    *found = 0;
    for (Gpu *g = gpus; g < gpus + count; g++)
        *found += g->parent < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, Gpu **found) { return nth(-1, number, found); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **found)
{
    for (Gpu *g = gpus; g < gpus + count; g++)
        if (!strcmp(g->uuid, uuid))
            return *found = g, look(g);
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) { ASK(gpu); strncpy(text, gpu->uuid, size); return OK; }
int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) { ASK(gpu); strncpy(text, gpu->name, size); return OK; }

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *most) { ASK(gpu); *most = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned number, Gpu **found)
{
    ASK(gpu);
    return nth(gpu - gpus, number, found);
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *later)
{
    ASK(gpu);
    if (gpu->major < 8)
        return NOT_SUPPORTED;
    *now = *later = 0;
    for (Gpu *g = gpus; g < gpus + count; g++)
        *now |= g->parent == gpu - gpus;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor)
{
    ASK(gpu);
    *major = gpu->major, *minor = gpu->minor;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned rates[2])
{
    ASK(gpu);
    if (gpu->parent >= 0)
        return NOT_SUPPORTED; /* NVML tells no rates of instances */
    rates[0] = 37, rates[1] = 11;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *memory)
{
    ASK(gpu);
    if (memory->version != (sizeof(Memory) | 2u << 24))
        return INVALID_ARGUMENT;
    memory->total = 80ULL << 30, memory->used = 5ULL << 30, memory->reserved = 1ULL << 30;
    return OK;
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) { ASK(gpu); *milliwatts = 345000; return OK; }
int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *celsius) { ASK(gpu); *celsius = 61; return OK; }
int nvmlDeviceGetClockInfo(Gpu *gpu, int type, unsigned *megahertz) { ASK(gpu); *megahertz = 1410; return OK; }

int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *reasons)
{
    ASK(gpu);
    *reasons = 0x20; /* software: too warm */
    return OK;
}
