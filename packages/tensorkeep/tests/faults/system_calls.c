/* Fails one system call: preloaded (LD_PRELOAD), it counts the calls below while it is armed, and breaks one of them.

   Python's own functions are below `os`, so this reaches what no patched function of Python does: the module mmap, the
   start of threads, directories, and calls of ctypes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

static atomic_int armed, seen;
static int fails_at, chosen;
static const char *broken;

/* Count from now on, and break the call with this index, with this error or, if it is 0, with one that it often has. */
void arm(int index, int error)
{
    fails_at = index;
    chosen = error;
    broken = "";
    seen = 0;
    armed = 1;
}

/* Return how many calls were counted. */
int disarm(void)
{
    armed = 0;
    return seen;
}

/* Return the name of the call that was broken, or "". */
const char *broken_call(void)
{
    return broken;
}

static int fails(const char *name, int usual)
{
    if (!armed || atomic_fetch_add(&seen, 1) != fails_at)
        return 0;
    broken = name;
    errno = chosen ? chosen : usual;
    return errno;
}

#define CALL(type, name, parameters, arguments, usual, failure)                                                        \
    type name parameters                                                                                               \
    {                                                                                                                  \
        static type(*real) parameters;                                                                                 \
        int error;                                                                                                     \
        if (!real)                                                                                                     \
            real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                                        \
        if ((error = fails(#name, usual)))                                                                             \
            return failure;                                                                                            \
        return real arguments;                                                                                         \
    }

CALL(int, open64, (const char *path, int flags, mode_t mode), (path, flags, mode), EMFILE, -1)
CALL(int, openat64, (int at, const char *path, int flags, mode_t mode), (at, path, flags, mode), EMFILE, -1)
CALL(int, fcntl64, (int fd, int what, void *value), (fd, what, value), ENOLCK, -1)
CALL(int, flock, (int fd, int how), (fd, how), ENOLCK, -1)
CALL(int, dup3, (int fd, int to, int flags), (fd, to, flags), EMFILE, -1)
CALL(int, dup2, (int fd, int to), (fd, to), EMFILE, -1)
CALL(int, fstat64, (int fd, struct stat64 *found), (fd, found), ESTALE, -1)
CALL(int, stat64, (const char *path, struct stat64 *found), (path, found), ESTALE, -1)
CALL(int, lstat64, (const char *path, struct stat64 *found), (path, found), ESTALE, -1)
CALL(int, fstatat64, (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags), ESTALE, -1)
CALL(int, statvfs64, (const char *path, struct statvfs64 *found), (path, found), ESTALE, -1)
CALL(int, fstatvfs64, (int fd, struct statvfs64 *found), (fd, found), ESTALE, -1)
CALL(int, access, (const char *path, int mode), (path, mode), EACCES, -1)
CALL(off64_t, lseek64, (int fd, off64_t offset, int whence), (fd, offset, whence), EIO, -1)
CALL(ssize_t, read, (int fd, void *into, size_t count), (fd, into, count), EIO, -1)
CALL(ssize_t, pread64, (int fd, void *into, size_t count, off64_t offset), (fd, into, count, offset), EIO, -1)
CALL(ssize_t, preadv64v2, (int fd, const void *into, int count, off64_t offset, int flags),
     (fd, into, count, offset, flags), EIO, -1)
CALL(ssize_t, write, (int fd, const void *from, size_t count), (fd, from, count), ENOSPC, -1)
CALL(ssize_t, pwrite64, (int fd, const void *from, size_t count, off64_t offset), (fd, from, count, offset), EDQUOT, -1)
CALL(ssize_t, pwritev64v2, (int fd, const void *from, int count, off64_t offset, int flags),
     (fd, from, count, offset, flags), EDQUOT, -1)
CALL(ssize_t, copy_file_range, (int fd, off64_t *from, int to, off64_t *at, size_t count, unsigned flags),
     (fd, from, to, at, count, flags), EIO, -1)
CALL(ssize_t, sendfile64, (int to, int fd, off64_t *from, size_t count), (to, fd, from, count), EIO, -1)
CALL(int, fsync, (int fd), (fd), ENOSPC, -1)
CALL(int, fdatasync, (int fd), (fd), ENOSPC, -1)
CALL(int, ftruncate64, (int fd, off64_t size), (fd, size), ENOSPC, -1)
CALL(int, posix_fallocate64, (int fd, off64_t offset, off64_t size), (fd, offset, size), ENOSPC, error)
CALL(int, posix_fadvise64, (int fd, off64_t offset, off64_t size, int advice), (fd, offset, size, advice), EINVAL, error)
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC, -1)
CALL(int, rename, (const char *from, const char *to), (from, to), EXDEV, -1)
CALL(int, renameat2, (int at, const char *from, int into, const char *to, unsigned flags), (at, from, into, to, flags),
     ENOSPC, -1)
CALL(int, link, (const char *from, const char *to), (from, to), EMLINK, -1)
CALL(int, unlink, (const char *path), (path), EACCES, -1)
CALL(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), EACCES, -1)
CALL(int, rmdir, (const char *path), (path), EACCES, -1)
CALL(ssize_t, readlink, (const char *path, char *into, size_t size), (path, into, size), EACCES, -1)
CALL(char *, getcwd, (char *into, size_t size), (into, size), ENOENT, 0)
CALL(DIR *, opendir, (const char *path), (path), EMFILE, 0)
CALL(DIR *, fdopendir, (int fd), (fd), ENOMEM, 0)
CALL(struct dirent64 *, readdir64, (DIR * folder), (folder), EIO, 0)
CALL(void *, mmap64, (void *at, size_t size, int protection, int flags, int fd, off64_t offset),
     (at, size, protection, flags, fd, offset), ENOMEM, (void *)-1)
CALL(int, madvise, (void *at, size_t size, int advice), (at, size, advice), EINVAL, -1)
CALL(int, mincore, (void *at, size_t size, unsigned char *into), (at, size, into), EAGAIN, -1)
CALL(int, memfd_create, (const char *name, unsigned flags), (name, flags), EMFILE, -1)
CALL(int, pipe2, (int *ends, int flags), (ends, flags), EMFILE, -1)
CALL(int, pthread_create, (pthread_t * thread, const pthread_attr_t *settings, void *(*run)(void *), void *argument),
     (thread, settings, run, argument), EAGAIN, error)

/* Linux closes the descriptor in any case. */
int close(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "close");
    int result = real(fd);
    return fails("close", EIO) ? -1 : result;
}
