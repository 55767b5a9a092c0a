#pragma once

#include "kernels/ep/combine.cuh"
#include "kernels/ep/combine_tokens.cuh"
#include "kernels/ep/dispatch.cuh"
#include "kernels/ep/dispatch_tokens.cuh"

// The kernels for experts, under the names of kernel_id.h.
#define MOONCAKE_EP(name, arguments_type, function)                                          \
  extern "C" __global__ void __launch_bounds__(512, 1)                                       \
      mooncake_##name(const __grid_constant__ mooncake::kernels::arguments_type arguments) { \
    mooncake::kernels::function(arguments);                                                  \
  }
MOONCAKE_EP(dispatch_send, DispatchSend, dispatchSend)
MOONCAKE_EP(dispatch_receive, DispatchReceive, dispatchReceive)
MOONCAKE_EP(combine_send, CombineSend, combineSend)
MOONCAKE_EP(combine_receive, CombineReceive, combineReceive)
MOONCAKE_EP(dispatch_tokens, DispatchTokens, dispatchTokens)
MOONCAKE_EP(combine_tokens, CombineTokens, combineTokens)
#undef MOONCAKE_EP
