/* Loaded before the C library: the N-th call of a kind on a file below a folder fails. Built and used by writes.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, SYNC, RENAME, OPEN, MKDIR, READ, KINDS };
static char folder[4096];
static int armed_kind = -1, armed_errno;
static long armed_at;
static atomic_long counts[KINDS];

void fault_arm(const char *below, int kind, long at, int error) {
    for (int i = 0; i < KINDS; i++) counts[i] = 0;
    snprintf(folder, sizeof folder, "%s", below);
    armed_kind = kind, armed_at = at, armed_errno = error;
}
long fault_count(int kind) { return counts[kind]; }

static int is_below(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }
static int is_below_fd(int fd, const char *name) {
    char link[64], path[4096];
    if (name && name[0] == '/') return is_below(name);
    if (fd == AT_FDCWD) return is_below(name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}
static int fails(int kind, int below) {
    if (!folder[0] || !below) return 0;
    long number = ++counts[kind];
    if (kind != armed_kind || number != armed_at) return 0;
    errno = armed_errno;
    return 1;
}
#define REAL(result, name, ...) static result (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    return fails(WRITE, is_below_fd(fd, NULL)) ? -1 : real(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int num) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    return fails(WRITE, is_below_fd(fd, NULL)) ? -1 : real(fd, parts, num);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return fails(WRITE, is_below_fd(fd, NULL)) ? -1 : real(fd, data, size, at);
}
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    return fails(READ, is_below_fd(fd, NULL)) ? -1 : real(fd, data, size);
}
int fsync(int fd) {
    REAL(int, "fsync", int);
    return fails(SYNC, is_below_fd(fd, NULL)) ? -1 : real(fd);
}
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return fails(RENAME, is_below(from)) ? -1 : real(from, to);
}
int renameat(int one, const char *from, int other, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    return fails(RENAME, is_below_fd(one, from)) ? -1 : real(one, from, other, to);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return fails(MKDIR, is_below(path)) ? -1 : real(path, mode);
}
#define OPENS(name)                                                          \
    int name(const char *path, int flags, ...) {                             \
        REAL(int, #name, const char *, int, ...);                            \
        va_list more; va_start(more, flags);                                 \
        mode_t mode = va_arg(more, mode_t); va_end(more);                    \
        int writes = flags & (O_CREAT | O_WRONLY | O_RDWR);                  \
        return fails(OPEN, writes && is_below(path)) ? -1 : real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
#define OPENATS(name)                                                        \
    int name(int fd, const char *path, int flags, ...) {                     \
        REAL(int, #name, int, const char *, int, ...);                       \
        va_list more; va_start(more, flags);                                 \
        mode_t mode = va_arg(more, mode_t); va_end(more);                    \
        int writes = flags & (O_CREAT | O_WRONLY | O_RDWR);                  \
        return fails(OPEN, writes && is_below_fd(fd, path)) ? -1 : real(fd, path, flags, mode); \
    }
OPENATS(openat)
OPENATS(openat64)
