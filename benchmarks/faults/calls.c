/* Loaded before the C library: of calls on files below a folder, the N-th of a kind fails, or all are written down.
   Built and used by preloaded.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(result, name, ...) static result (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

/* --- faults ------------------------------------------------------------------------------------------------------ */

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

static int is_below(const char *path) {
    size_t size = strlen(folder);
    return size && path && !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}
static int is_below_fd(int fd, const char *name) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    if ((name && name[0] == '/') || fd == AT_FDCWD) return is_below(name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}
static int fails(int kind, int below) {
    if (!below) return 0;
    long number = ++counts[kind];
    if (kind != armed_kind || number != armed_at) return 0;
    errno = armed_errno;
    return 1;
}

/* --- the record: a line for each call, by inode numbers; after a W line its bytes --------------------------------- */

static FILE *record;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

int record_to(const char *path) { record = fopen(path, "wb"); return record != NULL; }
void record_end(void) { if (record) fclose(record); record = NULL; }

static unsigned long inode_of(int fd) { struct stat s; return fstat(fd, &s) ? 0 : s.st_ino; }
static unsigned long inode_at(int fd, const char *path) {
    struct stat s;
    return fstatat(fd, path, &s, AT_SYMLINK_NOFOLLOW) ? 0 : s.st_ino;
}
static unsigned long parent_of(int fd, const char *path, const char **name) {
    char parent[4096];
    const char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    return slash || fd == AT_FDCWD ? inode_at(fd, parent) : inode_of(fd);
}
static int begins(int below) {
    if (!record || !below) return 0;
    pthread_mutex_lock(&one_at_a_time);
    return 1;
}
static void ends(int begun) {
    if (begun) pthread_mutex_unlock(&one_at_a_time);
}
static void written(int fd, off64_t at, const struct iovec *parts, int num, ssize_t size) {
    fprintf(record, "W %lu %lld %zd\n", inode_of(fd), (long long)at, size);
    for (int i = 0; i < num && size > 0; i++) {
        size_t own = parts[i].iov_len < (size_t)size ? parts[i].iov_len : (size_t)size;
        fwrite(parts[i].iov_base, 1, own, record);
        size -= own;
    }
    fputc('\n', record);
}

/* --- the calls ---------------------------------------------------------------------------------------------------- */

ssize_t writev(int fd, const struct iovec *parts, int num) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    int below = is_below_fd(fd, NULL);
    if (fails(WRITE, below)) return -1;
    int begun = begins(below);
    ssize_t size = real(fd, parts, num);
    if (begun && size > 0) written(fd, lseek64(fd, 0, SEEK_CUR) - size, parts, num, size);
    ends(begun);
    return size;
}
ssize_t write(int fd, const void *data, size_t all) {
    REAL(ssize_t, "write", int, const void *, size_t);
    int below = is_below_fd(fd, NULL);
    if (fails(WRITE, below)) return -1;
    int begun = begins(below);
    ssize_t size = real(fd, data, all);
    struct iovec part = {(void *)data, all};
    if (begun && size > 0) written(fd, lseek64(fd, 0, SEEK_CUR) - size, &part, 1, size);
    ends(begun);
    return size;
}
#define PWRITES(name)                                                                  \
    ssize_t name(int fd, const void *data, size_t all, off64_t at) {                   \
        REAL(ssize_t, #name, int, const void *, size_t, off64_t);                      \
        int below = is_below_fd(fd, NULL);                                             \
        if (fails(WRITE, below)) return -1;                                            \
        int begun = begins(below);                                                     \
        ssize_t size = real(fd, data, all, at);                                        \
        struct iovec part = {(void *)data, all};                                       \
        if (begun && size > 0) written(fd, at, &part, 1, size);                        \
        ends(begun);                                                                   \
        return size;                                                                   \
    }
PWRITES(pwrite)
PWRITES(pwrite64)
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    return fails(READ, is_below_fd(fd, NULL)) ? -1 : real(fd, data, size);
}
#define SYNCS(name)                                                                    \
    int name(int fd) {                                                                 \
        REAL(int, #name, int);                                                         \
        int below = is_below_fd(fd, NULL);                                             \
        if (fails(SYNC, below)) return -1;                                             \
        int begun = begins(below), result = real(fd);                                  \
        if (begun && !result) fprintf(record, "S %lu\n", inode_of(fd));                \
        ends(begun);                                                                   \
        return result;                                                                 \
    }
SYNCS(fsync)
SYNCS(fdatasync)
#define TRUNCATES(name)                                                                \
    int name(int fd, off64_t size) {                                                   \
        REAL(int, #name, int, off64_t);                                                \
        int begun = begins(is_below_fd(fd, NULL)), result = real(fd, size);            \
        if (begun && !result) fprintf(record, "T %lu %lld\n", inode_of(fd), (long long)size); \
        ends(begun);                                                                   \
        return result;                                                                 \
    }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)
int renameat(int one, const char *from, int other, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    int below = is_below_fd(one, from);
    if (fails(RENAME, below)) return -1;
    int begun = begins(below);
    const char *old_name, *new_name;
    unsigned long old_parent = begun ? parent_of(one, from, &old_name) : 0;
    unsigned long new_parent = begun ? parent_of(other, to, &new_name) : 0, inode = begun ? inode_at(one, from) : 0;
    int result = real(one, from, other, to);
    if (begun && !result) fprintf(record, "R %lu %lu %s/%lu %s\n", inode, old_parent, old_name, new_parent, new_name);
    ends(begun);
    return result;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int mkdirat(int fd, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    int below = is_below_fd(fd, path);
    if (fails(MKDIR, below)) return -1;
    int begun = begins(below), result = real(fd, path, mode);
    const char *name;
    if (begun && !result) {
        unsigned long parent = parent_of(fd, path, &name);
        fprintf(record, "D %lu %lu %s\n", inode_at(fd, path), parent, name);
    }
    ends(begun);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int unlinkat(int fd, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    int begun = begins(is_below_fd(fd, path));
    const char *name;
    unsigned long parent = begun ? parent_of(fd, path, &name) : 0, inode = begun ? inode_at(fd, path) : 0;
    int result = real(fd, path, flags);
    if (begun && !result) fprintf(record, "U %lu %lu %s\n", inode, parent, name);
    ends(begun);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int opened(int fd, const char *path, int flags, mode_t mode, int (*real)(int, const char *, int, ...)) {
    int writes = flags & (O_CREAT | O_WRONLY | O_RDWR), below = writes && is_below_fd(fd, path);
    if (fails(OPEN, below)) return -1;
    int begun = begins(below), was_there = begun && inode_at(fd, path) != 0;
    int file = real(fd, path, flags, mode);
    const char *name;
    if (begun && file >= 0 && !was_there) {
        unsigned long parent = parent_of(fd, path, &name);
        fprintf(record, "C %lu %lu %s\n", inode_of(file), parent, name);
    } else if (begun && file >= 0 && (flags & O_TRUNC)) {
        fprintf(record, "T %lu 0\n", inode_of(file));
    }
    ends(begun);
    return file;
}
#define MODE(flags) va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more)
#define OPENATS(name)                                                                  \
    int name(int fd, const char *path, int flags, ...) {                               \
        REAL(int, #name, int, const char *, int, ...);                                 \
        MODE(flags);                                                                   \
        return opened(fd, path, flags, mode, real);                                    \
    }
OPENATS(openat)
OPENATS(openat64)
int open(const char *path, int flags, ...) { MODE(flags); return openat(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); return openat64(AT_FDCWD, path, flags, mode); }
