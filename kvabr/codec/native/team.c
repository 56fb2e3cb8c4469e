/* Threads that share work, item by item, phase by phase: started once for a group, since starting one takes as long as decoding
 * a few rows. The thread that made the team works, too. */
#include "kvcoder.h"
#include <pthread.h>
#include <stdlib.h>

struct Team {
    pthread_t thread[MAX_THREADS];
    uint32_t size;    /* with the one that made it */
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    uint64_t phase;   /* changes when there is work */
    uint32_t working; /* threads that have not ended the phase */
    int over;
    Job job;
    void *context;
    uint32_t items, next;
};

static void work(Team *team, uint32_t worker) {
    uint32_t item;
    while ((item = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED)) < team->items)
        team->job(team->context, item, worker);
}

typedef struct {
    Team *team;
    uint32_t worker;
} Member;

static void *member(void *given) {
    Member self = *(Member *)given;
    Team *team = self.team;
    free(given);
    uint64_t seen = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->phase == seen && !team->over)
            pthread_cond_wait(&team->begun, &team->lock);
        if (team->over)
            break;
        seen = team->phase;
        pthread_mutex_unlock(&team->lock);
        work(team, self.worker);
        pthread_mutex_lock(&team->lock);
        if (--team->working == 0)
            pthread_cond_signal(&team->ended);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

Team *team_new(uint32_t threads) {
    Team *team = calloc(1, sizeof *team);
    if (!team)
        return NULL;
    team->size = 1;
    if (pthread_mutex_init(&team->lock, NULL))
        goto no_lock;
    if (pthread_cond_init(&team->begun, NULL))
        goto no_begun;
    if (pthread_cond_init(&team->ended, NULL))
        goto no_ended;
    while (team->size < at_most(threads, MAX_THREADS)) {
        Member *given = malloc(sizeof *given);
        if (!given)
            break;
        *given = (Member){team, team->size};
        if (pthread_create(&team->thread[team->size], NULL, member, given)) {
            free(given);
            break;
        }
        team->size++;
    }
    return team;
no_ended:
    pthread_cond_destroy(&team->begun);
no_begun:
    pthread_mutex_destroy(&team->lock);
no_lock:
    free(team);
    return NULL;
}

void team_run(Team *team, Job job, void *context, uint32_t items) {
    if (team->size == 1 || items <= 1) {
        for (uint32_t item = 0; item < items; item++)
            job(context, item, 0);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->job = job, team->context = context, team->items = items, team->next = 0;
    team->working = team->size - 1;
    team->phase++;
    pthread_cond_broadcast(&team->begun);
    pthread_mutex_unlock(&team->lock);
    work(team, 0);
    pthread_mutex_lock(&team->lock);
    while (team->working)
        pthread_cond_wait(&team->ended, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

void team_free(Team *team) {
    if (!team)
        return;
    pthread_mutex_lock(&team->lock);
    team->over = 1;
    pthread_cond_broadcast(&team->begun);
    pthread_mutex_unlock(&team->lock);
    for (uint32_t i = 1; i < team->size; i++)
        pthread_join(team->thread[i], NULL);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->begun);
    pthread_cond_destroy(&team->ended);
    free(team);
}
