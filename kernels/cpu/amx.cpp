#include "amx.h"

#ifdef PD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pd {

#ifdef PD_AMX
namespace {

// From Linux' asm/prctl.h and the state components of Intel's SDM; not in all systems' headers.
constexpr int kRequestPermission = 0x1023, kTileData = 18;

}  // namespace

// Linux refuses if, say, a thread's signal stack has no room for the registers, or if a sandbox
// does not know the call.
bool have_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}
#endif

}  // namespace pd
