/* SPDX-License-Identifier: MIT OR Unlicense */
/* roles.h - who does what in PPO: actor, reference, critic and reward models on one group of
 * ranks, or on groups of their own, and texts by the actor's ranks or by some that do nothing
 * else. A group is a world of its own, with its own D x P: no bit depends on where a role is.
 *
 * What a model is asked for - texts, log-probs, scores, values - all ranks get to know, so that
 * what looks at more than one of them is the same plain arithmetic everywhere. */
#ifndef DEMO_ROLES_H
#define DEMO_ROLES_H
#include "options.h"

enum { DEMO_ACTOR, DEMO_REF, DEMO_CRITIC, DEMO_REWARD, DEMO_GENERATOR, DEMO_ROLES };

typedef struct {
    /* asked for; 0: none were */
    int64_t nodes[DEMO_ROLES], per_node[DEMO_ROLES];
    bool actor_ref, critic_reward, all; /* share a group */
    int groups, group[DEMO_ROLES];      /* the roles' groups; -1: nobody has the role */
    int64_t ranks[DEMO_ROLES];          /* of a group; they follow each other */
} demo_roles;

/* clang-format off */
#define DEMO_ROLE_BINDINGS(p, name, role) \
    {name "_num_nodes", &(p).roles.nodes[role], DEMO_INT, "1", \
     "hosts of the " name "'s ranks", DEMO_COUNT(1)}, \
    { \
        name "_num_gpus_per_node", &(p).roles.per_node[role], DEMO_INT, "0", \
            "ranks a host of the " name "; 0: with the actor's, or where none are given for any " \
            "role all on one group", \
            DEMO_COUNT(0) \
    }
/* clang-format on */

/* Ranks of a role that has a group of its own. */
static int64_t demo_role_ranks(const demo_roles *r, int role) {
    return r->per_node[role] ? r->nodes[role] * r->per_node[role] : 0;
}

/* The group of a role: a new one, or that of another role. */
static void demo_role_assign_group(demo_roles *r, int role, bool wanted, bool shares,
                                   int with) {
    int64_t ranks = demo_role_ranks(r, role);
    r->group[role] = -1;
    if (!wanted) return;
    if (r->all || shares || !ranks) {
        r->group[role] = r->group[with] < 0 ? r->group[DEMO_ACTOR] : r->group[with];
        return;
    }
    r->ranks[r->groups] = ranks;
    r->group[role] = r->groups++;
}

/* Lays the groups out; critic, reward, generator: whether there are such. Without ranks for any
   role there is one group, of as many ranks as the run has (ranks 0). */
static void demo_roles_lay(demo_roles *r, bool critic, bool reward) {
    r->groups = 1;
    r->group[DEMO_ACTOR] = 0;
    r->ranks[0] = demo_role_ranks(r, DEMO_ACTOR);
    demo_role_assign_group(r, DEMO_REF, true, r->actor_ref, DEMO_ACTOR);
    demo_role_assign_group(r, DEMO_CRITIC, critic, false, DEMO_ACTOR);
    demo_role_assign_group(r, DEMO_REWARD, reward, r->critic_reward && critic, DEMO_CRITIC);
    demo_role_assign_group(r, DEMO_GENERATOR, r->nodes[DEMO_GENERATOR] > 0, false, DEMO_ACTOR);
    if (r->group[DEMO_GENERATOR] == 0) r->group[DEMO_GENERATOR] = -1; /* the actor's own */
}
#endif
