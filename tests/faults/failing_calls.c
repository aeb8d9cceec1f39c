/*
 * For LD_PRELOAD: the n-th call of a class, on files below $FAULT_FOLDERS (separated by colons), fails, counted over
 * all processes of a run. $FAULT_COUNTER is a file of two 64-bit numbers: the calls so far, and how many failed.
 *
 * $FAULT_CALL is the class, $FAULT_NTH counts from 1, $FAULT_ERRNO is a number; 0 makes a read or write short: one byte.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static const char *class, *folders;
static long long nth;
static int error;
static struct { unsigned long long calls, failed; } *counter;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAULT_COUNTER"), *number = getenv("FAULT_NTH"), *code = getenv("FAULT_ERRNO");
    class = getenv("FAULT_CALL"), folders = getenv("FAULT_FOLDERS");
    if (!class || !folders || !path || !number || !code)
        return;
    nth = atoll(number), error = atoi(code);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    void *shared = file < 0 ? (void *)-1L
                            : (void *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        syscall(SYS_close, file);
    if (shared != (void *)-1L)
        counter = shared;
}

static int is_below(const char *path)
{
    for (const char *at = folders; *at;) {
        size_t length = strcspn(at, ":");
        if (length && !strncmp(path, at, length) && (path[length] == '/' || !path[length]))
            return 1;
        at += length + (at[length] == ':');
    }
    return 0;
}

/* Where a descriptor leads; -1 where that is not known. */
static ssize_t place_of(int file, char *place)
{
    char link[64];
    if (file == AT_FDCWD)
        strcpy(link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, place, PATH_MAX - 1);
    place[length < 0 ? 0 : length] = 0;
    return length;
}

/* Whether this call is the one; its error, if any, is set. */
static int fails(const char *name, int folder, const char *path)
{
    int before = errno;
    char place[2 * PATH_MAX];
    if (!counter || strcmp(class, name))
        return 0;
    if (path && *path == '/')
        snprintf(place, sizeof place, "%s", path);
    else {
        ssize_t length = place_of(folder, place);
        if (length >= 0 && path && *path)
            snprintf(place + length, PATH_MAX, "/%s", path);
    }
    errno = before;
    if (!is_below(place) || __atomic_add_fetch(&counter->calls, 1, __ATOMIC_SEQ_CST) != (unsigned long long)nth)
        return 0;
    __atomic_add_fetch(&counter->failed, 1, __ATOMIC_SEQ_CST);
    if (getenv("FAULT_SHOW"))
        fprintf(stderr, "[failed: %s %s]\n", name, place);
    errno = error;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return fails("open", AT_FDCWD, path) ? -1 : NEXT(name)(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return fails("open", folder, path) ? -1 : NEXT(name)(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* A short read or write is one byte; of a single byte nothing can be left out. */
#define PART(count) ((count) > 1 ? 1 : (count))
#define MOVE(class, name, data) \
    ssize_t name(int file, data *bytes, size_t count) \
    { \
        if (fails(class, file, NULL)) \
            return error ? -1 : NEXT(name)(file, bytes, PART(count)); \
        return NEXT(name)(file, bytes, count); \
    }
#define MOVE_AT(class, name, data, offset) \
    ssize_t name(int file, data *bytes, size_t count, offset at) \
    { \
        if (fails(class, file, NULL)) \
            return error ? -1 : NEXT(name)(file, bytes, PART(count), at); \
        return NEXT(name)(file, bytes, count, at); \
    }
MOVE("read", read, void)
MOVE_AT("read", pread, void, off_t)
MOVE_AT("read", pread64, void, off64_t)
MOVE("write", write, const void)
MOVE_AT("write", pwrite, const void, off_t)
MOVE_AT("write", pwrite64, const void, off64_t)

#define OF_FILE(class, name) \
    int name(int file) { return fails(class, file, NULL) ? -1 : NEXT(name)(file); }
OF_FILE("fsync", fsync)
OF_FILE("fsync", fdatasync)

int close(int file)
{
    int has_failed = fails("close", file, NULL);
    int answer = syscall(SYS_close, file);
    if (has_failed)
        errno = error;
    return has_failed ? -1 : answer;
}

#define RESIZE(name, offset) \
    int name(int file, offset size) { return fails("resize", file, NULL) ? -1 : NEXT(name)(file, size); }
RESIZE(ftruncate, off_t)
RESIZE(ftruncate64, off64_t)
#define ALLOCATE(name, offset) \
    int name(int file, offset at, offset size) { return fails("resize", file, NULL) ? error : NEXT(name)(file, at, size); }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int rename(const char *old, const char *new)
{
    return fails("rename", AT_FDCWD, new) ? -1 : NEXT(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new)
{
    return fails("rename", to, new) ? -1 : NEXT(renameat)(from, old, to, new);
}

int mkdir(const char *path, mode_t mode) { return fails("mkdir", AT_FDCWD, path) ? -1 : NEXT(mkdir)(path, mode); }
int unlink(const char *path) { return fails("unlink", AT_FDCWD, path) ? -1 : NEXT(unlink)(path); }
int unlinkat(int folder, const char *path, int flags)
{
    return fails("unlink", folder, path) ? -1 : NEXT(unlinkat)(folder, path, flags);
}
int flock(int file, int how) { return fails("flock", file, NULL) ? -1 : NEXT(flock)(file, how); }

/* Only files are mapped here: the C library's own calls for memory do not come by. */
#define MAP(name, offset) \
    void *name(void *place, size_t length, int protection, int flags, int file, offset at) \
    { \
        if (file >= 0 && fails("mmap", file, NULL)) \
            return MAP_FAILED; \
        return NEXT(name)(place, length, protection, flags, file, at); \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)
