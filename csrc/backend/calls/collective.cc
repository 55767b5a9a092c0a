#include "backend/calls/collective.h"

namespace mooncake {

Tensors Operand::all() const {
  if (lists.size() == 1) return lists.front();
  Tensors tensors;
  for (const Tensors& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
  return tensors;
}

const at::Tensor* Operand::firstDefined() const {
  for (const Tensors& list : lists) {
    for (const at::Tensor& tensor : list) {
      if (tensor.defined()) return &tensor;
    }
  }
  return nullptr;
}

const Operand& Collective::output() const { return kind->isInPlace ? given : result; }

const at::Tensor* Collective::leading() const {
  return kind->hasInputLists ? output().firstDefined() : input().firstDefined();
}

const at::Tensor& Collective::first() const {
  const at::Tensor* const ours = given.firstDefined();
  return ours ? *ours : *result.firstDefined();
}

}  // namespace mooncake
