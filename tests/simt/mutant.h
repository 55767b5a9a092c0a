#pragma once

namespace mooncake::simt {

// Number of the defect of tests/simt/mutants.py that this process has, from the environment
// variable MOONCAKE_SIMT_MUTANT; 0 if it has none.
int mutant();

// Whether the process has this defect. What the compiler evaluates has none.
constexpr bool isMutant(int number) {
  return !__builtin_is_constant_evaluated() && mutant() == number;
}

}  // namespace mooncake::simt
