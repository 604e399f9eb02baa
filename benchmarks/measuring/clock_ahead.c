/* A clock that is CLOCK_AHEAD seconds ahead, for the processes that load this before libc. Only the time of day: with
 * libfaketime 0.9.10 each time.sleep of Python 3.11 fails, unless the monotonic clock is ahead as well.
 *
 *     cc -shared -fPIC -o clock_ahead.so clock_ahead.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t ahead(void) {
    const char *seconds = getenv("CLOCK_AHEAD");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    int result = syscall(SYS_gettimeofday, now, zone);
    if (result == 0)
        now->tv_sec += ahead();
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds != NULL)
        *seconds = now.tv_sec;
    return now.tv_sec;
}

/* Takes a time of day, which the kernel compares with its own. */
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    int (*stock)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec kernels = *until;
    kernels.tv_sec -= ahead();
    return stock(semaphore, &kernels);
}
