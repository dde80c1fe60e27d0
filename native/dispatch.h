/* Loops in several variants; all give the same integers. */
#ifndef SHARDMILL_DISPATCH_H
#define SHARDMILL_DISPATCH_H

/* The loader takes the variant for this processor; without it (musl, other architectures) there is the baseline. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_INSTRUCTION_SET __attribute__((target_clones("avx2", "default")))
/* Shifts by any number are one instruction of three operands there. */
#define FOR_EACH_PROCESSOR __attribute__((target_clones("bmi2", "default")))
#else
#define FOR_EACH_INSTRUCTION_SET
#define FOR_EACH_PROCESSOR
#endif

#endif
