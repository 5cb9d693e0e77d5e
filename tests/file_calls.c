/* Stands between a process and libc, as an LD_PRELOAD library: the calls on files below the folder
 * FILE_CALLS_ROOT are counted, can be made to fail, and are recorded in the file FILE_CALLS_LOG.
 * It is reached by whatever calls libc: Python, SQLite, pyarrow. Not by writes through mmap, which
 * SQLite makes to its -shm file alone, nor by system calls that are made without libc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, LINK = 16, MKDIR = 32, UNLINK = 64, CUT = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1, records;
static int kinds, error_number, lasts;
static long due_at, num_seen, num_failed;

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin_process(void) {
  const char *folder = getenv("FILE_CALLS_ROOT"), *log = getenv("FILE_CALLS_LOG");
  if (folder && strlen(folder) < sizeof root) root_length = strlen(strcpy(root, folder));
  if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void file_calls_record(int is_on) { records = is_on && log_fd >= 0; }

void file_calls_fail(int of_kinds, long at, int with_error, int for_good) {
  pthread_mutex_lock(&lock);
  kinds = of_kinds, due_at = at, error_number = with_error, lasts = for_good;
  if (of_kinds) num_seen = num_failed = 0;
  pthread_mutex_unlock(&lock);
}

long file_calls_seen(void) { return num_seen; }
long file_calls_failed(void) { return num_failed; }

static int is_below(const char *path) {
  return root_length && !strncmp(path, root, root_length) &&
         (path[root_length] == '/' || !path[root_length]);
}

static int is_ours(int folder, const char *path, char *whole) {
  if (!root_length || !path) return 0;
  size_t length = 0;
  if (path[0] != '/') {
    if (folder == AT_FDCWD) {
      if (!getcwd(whole, PATH_MAX)) return 0;
      length = strlen(whole);
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t got = readlink(link, whole, PATH_MAX - 1);
      if (got <= 0) return 0;
      length = got;
    }
    whole[length++] = '/';
  }
  if (length + strlen(path) >= PATH_MAX) return 0;
  strcpy(whole + length, path);
  return is_below(whole);
}

static int is_our_file(int fd) {
  if (!root_length || fd == log_fd) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t got = readlink(link, path, sizeof path - 1);
  if (got <= 0) return 0;
  path[got] = 0;
  return is_below(path);
}

static int fails(int kind) {
  int is_due = 0;
  if (!(kinds & kind)) return 0;
  pthread_mutex_lock(&lock);
  num_seen++;
  if (due_at && (num_seen == due_at || (lasts && num_seen > due_at))) is_due = ++num_failed;
  pthread_mutex_unlock(&lock);
  if (is_due) errno = error_number;
  return is_due;
}

static void begin(void) { if (records) pthread_mutex_lock(&lock); }
static void end(void) { if (records) { int kept = errno; pthread_mutex_unlock(&lock); errno = kept; } }

static void note(const char *what, unsigned long node, long long at, const void *bytes, long long size,
                 const char *path, const char *other) {
  if (!records) return;
  int kept = errno;
  char head[2 * PATH_MAX + 128];
  int length = snprintf(head, sizeof head, "%s\t%lu\t%lld\t%lld\t%s\t%s\n", what, node, at,
                        bytes ? size : 0, path, other);
  struct iovec parts[2] = {{head, length}, {(void *)bytes, bytes ? size : 0}};
  syscall(SYS_writev, log_fd, parts, 2);
  errno = kept;
}

static unsigned long node_of(int fd) {
  struct stat found;
  return fstat(fd, &found) ? 0 : found.st_ino;
}

void file_calls_mark(const char *text) {
  pthread_mutex_lock(&lock);
  note("mark", 0, 0, NULL, 0, text, "");
  pthread_mutex_unlock(&lock);
}

static int opened(int (*call)(int, const char *, int, ...), int folder, const char *path, int flags,
                  mode_t mode) {
  char whole[PATH_MAX];
  if (!is_ours(folder, path, whole)) return call(folder, path, flags, mode);
  int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
  int may = writes || (error_number != ENOSPC && error_number != EROFS);
  if (may && fails(OPEN)) return -1;
  struct stat found;
  begin();
  int is_new = (flags & O_CREAT) && lstat(whole, &found);
  int fd = call(folder, path, flags, mode);
  if (fd >= 0 && is_new) note("create", node_of(fd), 0, NULL, 0, whole, "");
  else if (fd >= 0 && (flags & O_TRUNC)) note("cut", node_of(fd), 0, NULL, 0, whole, "");
  end();
  return fd;
}

#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); \
  }
typedef int (*open_call)(int, const char *, int, ...);
static open_call real_openat(void) {
  static open_call real;
  if (!real) real = (open_call)dlsym(RTLD_NEXT, "openat64");
  return real;
}
int open(const char *path, int flags, ...) { MODE(flags) return opened(real_openat(), AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(real_openat(), AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return opened(real_openat(), folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return opened(real_openat(), folder, path, flags, mode); }

ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (!is_our_file(fd)) return real(fd, bytes, size);
  if (fails(WRITE)) return -1;
  begin();
  ssize_t done = real(fd, bytes, size);
  if (done > 0) note("write", node_of(fd), lseek(fd, 0, SEEK_CUR) - done, bytes, done, "", "");
  end();
  return done;
}

static ssize_t placed(ssize_t (*real)(int, const void *, size_t, off_t), int fd, const void *bytes,
                      size_t size, off_t at) {
  if (!is_our_file(fd)) return real(fd, bytes, size, at);
  if (fails(WRITE)) return -1;
  begin();
  ssize_t done = real(fd, bytes, size, at);
  if (done > 0) note("write", node_of(fd), at, bytes, done, "", "");
  end();
  return done;
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) {
  REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
  return placed(real, fd, bytes, size, at);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off_t at) {
  REAL(ssize_t, pwrite64, int, const void *, size_t, off_t);
  return placed(real, fd, bytes, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int num_parts) {
  REAL(ssize_t, writev, int, const struct iovec *, int);
  if (!is_our_file(fd)) return real(fd, parts, num_parts);
  ssize_t total = 0;
  for (int i = 0; i < num_parts; i++) {
    ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
    if (done < 0) return total ? total : -1;
    total += done;
    if ((size_t)done < parts[i].iov_len) break;
  }
  return total;
}

static int cut(int (*real)(int, off_t), int fd, off_t size) {
  if (!is_our_file(fd)) return real(fd, size);
  if (fails(CUT)) return -1;
  begin();
  int failed = real(fd, size);
  if (!failed) note("cut", node_of(fd), size, NULL, 0, "", "");
  end();
  return failed;
}
int ftruncate(int fd, off_t size) { REAL(int, ftruncate, int, off_t); return cut(real, fd, size); }
int ftruncate64(int fd, off_t size) { REAL(int, ftruncate64, int, off_t); return cut(real, fd, size); }

static int synced(int (*real)(int), int fd) {
  if (!is_our_file(fd)) return real(fd);
  if (fails(SYNC)) return -1;
  begin();
  int failed = real(fd);
  if (!failed) note("sync", node_of(fd), 0, NULL, 0, "", "");
  end();
  return failed;
}
int fsync(int fd) { REAL(int, fsync, int); return synced(real, fd); }
int fdatasync(int fd) { REAL(int, fdatasync, int); return synced(real, fd); }

int renameat(int from, const char *path, int to, const char *other) {
  REAL(int, renameat, int, const char *, int, const char *);
  char old[PATH_MAX], new[PATH_MAX];
  if (!is_ours(from, path, old) || !is_ours(to, other, new)) return real(from, path, to, other);
  if (fails(RENAME)) return -1;
  begin();
  int failed = real(from, path, to, other);
  if (!failed) note("rename", 0, 0, NULL, 0, old, new);
  end();
  return failed;
}
int rename(const char *path, const char *other) { return renameat(AT_FDCWD, path, AT_FDCWD, other); }

int linkat(int from, const char *path, int to, const char *other, int flags) {
  REAL(int, linkat, int, const char *, int, const char *, int);
  char old[PATH_MAX], new[PATH_MAX];
  if (!is_ours(from, path, old) || !is_ours(to, other, new)) return real(from, path, to, other, flags);
  if (fails(LINK)) return -1;
  begin();
  int failed = real(from, path, to, other, flags);
  if (!failed) note("link", 0, 0, NULL, 0, old, new);
  end();
  return failed;
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }

int unlinkat(int folder, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  char whole[PATH_MAX];
  if (!is_ours(folder, path, whole)) return real(folder, path, flags);
  if (fails(UNLINK)) return -1;
  begin();
  int failed = real(folder, path, flags);
  if (!failed) note("unlink", 0, 0, NULL, 0, whole, "");
  end();
  return failed;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
  REAL(int, mkdirat, int, const char *, mode_t);
  char whole[PATH_MAX];
  struct stat found;
  if (!is_ours(folder, path, whole)) return real(folder, path, mode);
  if (!lstat(whole, &found)) return real(folder, path, mode);
  if (fails(MKDIR)) return -1;
  begin();
  int failed = real(folder, path, mode);
  if (!failed && !lstat(whole, &found)) note("mkdir", found.st_ino, 0, NULL, 0, whole, "");
  end();
  return failed;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
