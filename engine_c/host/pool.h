/* A thread pool with one verb: run a task for every index of a range. It is what colibri_config_t.parallel_for wants.
 *
 *     colibri_pool_t *pool;
 *     if (colibri_pool_create(colibri_host_threads(), 0, &pool)) ...
 *     config.parallel_for = colibri_pool_run, config.parallel_ctx = pool, config.threads = n;
 *     ... colibri_pool_destroy(pool) after colibri_unload ...
 *
 * Fork and join.  The calling thread is lane 0 and works too; indices are claimed one by one, so the share of a lane
 *                 that was preempted or never woke is done by the others. n = 1 runs in the caller without any wake.
 * Idle lanes      spin for at most 20 us after the last job, then sleep in the kernel. The same holds for a caller
 *                 that waits for a lane's last task.
 * Concurrency.    Any thread may call run at any time: while one job is running, another caller (or a task that calls
 *                 run itself) does its own job alone. In a forked child run works, done by the caller alone.
 * Signals.        Worker threads block all signals but those of faults, so that handlers of these work in them too.
 */
#ifndef COLIBRI_POOL_H
#define COLIBRI_POOL_H
#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_POOL_PIN 1u            /* worker lane i stays on the i-th usable core; lane 0 is the caller's affair */
#define COLIBRI_POOL_MAX_THREADS 1024u

typedef struct colibri_pool colibri_pool_t;

/* Starts threads - 1 workers. Returns 0 and sets *pool, or an errno value (EINVAL, ENOMEM, EAGAIN) with *pool NULL and
 * nothing left running. */
int colibri_pool_create(uint32_t threads, uint32_t flags, colibri_pool_t **pool);

/* Calls task(arg, i) once for each i in [0, n); returns when all are done and their writes are visible. */
void colibri_pool_run(void *pool, colibri_task_fn task, void *arg, uint32_t n);

/* Stops and joins the workers. No run may be in progress. NULL is allowed. */
void colibri_pool_destroy(colibri_pool_t *pool);

#ifdef __cplusplus
}
#endif
#endif
